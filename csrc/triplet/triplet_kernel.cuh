// SPDX-License-Identifier: BSD-3-Clause
// CUDA kernels of triplet_margin_loss.
//
// Both are bound by memory. The forward reads each input once; where its threads hold whole rows it
// can form the gradients too before they let go of them, with the upstream gradient last seen
// (triplet_guess.h). The backward has nothing left to do where that was the right one; elsewhere it
// reads the rows that are not inactive and writes the gradients, with the same bits. A group of
// threads takes a row; blocks stride over the rows (gridDim.y) and, where a row is shared, over its
// segments (gridDim.x). Reductions run in a fixed order and there are no atomics, so results repeat
// bit for bit.
//
// triplet_forward   loss, state and perhaps gradients
// triplet_backward  gradients

#pragma once

#include "common/device/handover.cuh"
#include "common/device/reduce.cuh"
#include "triplet/triplet_formula.h"
#include "triplet/triplet_guess.h"
#include "triplet/triplet_rows.cuh"
#include "triplet/triplet_tuning.h"

namespace fused_ops {

constexpr int kMaxTripletWarps = kTripletLargestBlock / kWarpSize;
constexpr int kBackwardChunk = 1 << 30;  // elements of a row, whose offsets fit in 32 bits

static __device__ TripletGuess triplet_guesses[kTripletGuesses];

// |x|_p while elements come in; for p = inf also how many attain the maximum.
template <Norm norm, typename T>
struct Distance {
  T value{};

  __device__ void add(T x) {
    if constexpr (norm == Norm::two) value += x * x;
    if constexpr (norm == Norm::one) value += x < T(0) ? -x : x;
  }
  __device__ void merge(const Distance& other) { value += other.value; }
  __device__ T result() const { return norm == Norm::two ? sqrt(value) : value; }
};

template <typename T>
struct Distance<Norm::infinity, T> {
  T value{};
  long long ties = 0;

  __device__ void add(T x) { merge({x < T(0) ? -x : x, 1}); }
  __device__ void merge(const Distance& other) {
    if (value == other.value) {
      ties += other.ties;
    } else if (!(other.value < value) && value == value) {  // NaN wins
      *this = other;
    }
  }
  __device__ T result() const { return value; }
};

template <Norm norm, typename T>
struct Distances {
  Distance<norm, T> positive;
  Distance<norm, T> negative;
  Distance<norm, T> swap;

  // A zero in place of an element outside of the row adds nothing; nor does its tie with a maximum
  // of 0 matter, for phi is 0 there.
  template <typename scalar, bool whole>
  __device__ void add(const TripletAccess<scalar>& access, const TripletPart<scalar, whole>& part,
                      int offset, T eps, bool with_swap) {
#pragma unroll
    for (int i = 0; i < kAccessWidth<scalar>; ++i) {
      const bool counts = part.contains(offset + i);
      const T a = to_accumulate(access.anchor.get(i));
      const T p = to_accumulate(access.positive.get(i));
      const T n = to_accumulate(access.negative.get(i));
      positive.add(counts ? a - p + eps : T(0));
      negative.add(counts ? a - n + eps : T(0));
      if (with_swap) swap.add(counts ? p - n + eps : T(0));
    }
  }
  __device__ void merge(const Distances& other) {
    positive.merge(other.positive);
    negative.merge(other.negative);
    swap.merge(other.swap);
  }
};

template <Norm norm, typename T>
__device__ inline Distance<norm, T> shuffle_xor(Distance<norm, T> distance, int mask) {
  distance.value = __shfl_xor_sync(0xffffffffu, distance.value, mask);
  if constexpr (norm == Norm::infinity) {
    distance.ties = __shfl_xor_sync(0xffffffffu, distance.ties, mask);
  }
  return distance;
}

template <Norm norm, typename T>
__device__ inline Distances<norm, T> shuffle_xor(const Distances<norm, T>& d, int mask) {
  return {shuffle_xor(d.positive, mask), shuffle_xor(d.negative, mask), shuffle_xor(d.swap, mask)};
}

template <typename scalar, typename T>
__device__ inline void store_loss(const TripletForward& params, int64_t index, T loss) {
  if (params.accumulate_loss) {
    static_cast<T*>(params.loss)[index] = loss;
  } else {
    static_cast<scalar*>(params.loss)[index] = from_accumulate<scalar>(loss);
  }
}

// The gradients of one access.
template <Norm norm, typename scalar, bool whole, typename T>
__device__ inline void store_gradients(const TripletInputs& in, const TripletGradients& gradients,
                                       int64_t row, const TripletPart<scalar, whole>& part,
                                       int offset, bool inactive,
                                       const TripletAccess<scalar>& access,
                                       const TripletDistances<T>& d,
                                       const TripletCoefficients<T>& c) {
  Packed<scalar> anchor, positive, negative;
  if (!inactive) {
    const T eps = static_cast<T>(in.eps);
#pragma unroll
    for (int i = 0; i < kAccessWidth<scalar>; ++i) {
      const T x = to_accumulate(access.anchor.get(i));
      const T y = to_accumulate(access.positive.get(i));
      const T z = to_accumulate(access.negative.get(i));
      const T u = scaled_phi<norm>(x - y + eps, d.positive, c.positive);
      const T v = scaled_phi<norm>(x - z + eps, d.negative, c.negative);
      const T w = in.swap ? scaled_phi<norm>(y - z + eps, d.swap, c.swap) : T(0);
      anchor.set(i, from_accumulate<scalar>(u + v));
      positive.set(i, from_accumulate<scalar>(w - u));
      negative.set(i, from_accumulate<scalar>(-v - w));
    }
  }
  const int64_t begin = row * in.dim + part.begin;  // of the part in the contiguous gradients
  const auto to = [&](void* gradient, const Packed<scalar>& values) {
    if (gradient != nullptr) {
      store_access(part, static_cast<scalar*>(gradient) + begin, offset, values);
    }
  };
  to(gradients.anchor, anchor);
  to(gradients.positive, positive);
  to(gradients.negative, negative);
}

// The upstream gradient of a row's loss, from that of the loss.
template <typename T>
__device__ inline T row_upstream(T upstream, Reduction reduction, int64_t rows) {
  return reduction == Reduction::mean ? upstream / static_cast<T>(rows) : upstream;
}

// What the forward's blocks leave to each other. `segments` is (rows, gridDim.x) and unused where
// gridDim.x is 1; `sums` has gridDim.y elements.
template <Norm norm, typename T>
struct TripletHandovers {
  Handover<Distances<norm, T>>* segments;
  Handover<Sum<T>>* sums;
  uint64_t ticket;
};

// The distances of a whole row in the block of its last segment; elsewhere they are handed over and
// the result is false.
template <Norm norm, typename T>
__device__ inline bool gather_segments(const TripletHandovers<norm, T>& handovers, int64_t row,
                                       Distances<norm, T>& distances, Distances<norm, T>* shared) {
  auto* segments = handovers.segments + row * gridDim.x;
  if (blockIdx.x != gridDim.x - 1) {
    if (threadIdx.x == 0) hand_over(&segments[blockIdx.x], distances, handovers.ticket);
    return false;
  }
  Distances<norm, T> all;
  if (threadIdx.x == 0) all = distances;
  for (int i = threadIdx.x; i < gridDim.x - 1; i += blockDim.x) {
    all.merge(receive(&segments[i], handovers.ticket));
  }
  distances = reduce_group(all, blockDim.x, shared);
  return true;
}

// Adds the losses of all blocks, in float64 since there are few, in the last block.
template <typename scalar, Norm norm, typename T>
__device__ inline void add_losses(const TripletForward& params, T loss,
                                  const TripletHandovers<norm, T>& handovers) {
  __shared__ Sum<T> shared[kMaxTripletWarps];
  __shared__ Sum<double> shared_total[kMaxTripletWarps];
  const Sum<T> sum = reduce_group(Sum<T>{loss}, blockDim.x, shared);
  if (blockIdx.y != gridDim.y - 1) {
    if (threadIdx.x == 0) hand_over(&handovers.sums[blockIdx.y], sum, handovers.ticket);
    return;
  }
  Sum<double> total;
  if (threadIdx.x == 0) total.value = sum.value;
  for (int i = threadIdx.x; i < gridDim.y - 1; i += blockDim.x) {
    total.value += receive(&handovers.sums[i], handovers.ticket).value;
  }
  total = reduce_group(total, blockDim.x, shared_total);
  if (threadIdx.x != 0) return;
  const double rows = static_cast<double>(params.inputs.rows);
  const double result = params.reduction == Reduction::mean ? total.value / rows : total.value;
  store_loss<scalar>(params, 0, static_cast<T>(result));
}

// How the forward's threads walk, as its policy says.
struct TripletWalk {
  int threads_per_row;
  int accesses;
  int stages;
  int64_t segment_size;
};

// Visits the accesses of a thread to a part: which, and at what offset.
template <typename scalar, bool whole, typename Visit>
__device__ inline void for_each_offset(const TripletWalk& walk,
                                       const TripletPart<scalar, whole>& part, int thread,
                                       Visit visit) {
  for (int first = 0; first < walk.accesses; first += kTripletAccesses) {
#pragma unroll
    for (int i = first; i < first + kTripletAccesses; ++i) {
      const int offset = (i * walk.threads_per_row + thread) * kAccessWidth<scalar>;
      if (i < walk.accesses && part.reaches(offset)) visit(i, offset);
    }
  }
}

// Finishes a row whose distances all threads of its group hold: its state, its loss, which is
// returned in the group's first thread, and if it `forms` them its gradients from the slots.
template <Norm norm, typename scalar, bool whole, typename T>
__device__ inline T finish_row(const TripletForward& params, const TripletGradients& gradients,
                               bool forms, T upstream, int64_t row, const TripletWalk& walk,
                               int thread, const Distances<norm, T>& d,
                               const TripletSlots<scalar>& slots, int slot) {
  const TripletInputs& in = params.inputs;
  TripletRowState<T> state{
      {d.positive.result(), d.negative.result(), in.swap ? d.swap.result() : T(0)}, {}};
  if constexpr (norm == Norm::infinity) {
    state.ties = {static_cast<T>(d.positive.ties), static_cast<T>(d.negative.ties),
                  static_cast<T>(d.swap.ties)};
  }
  const T unclamped = unclamped_loss(state.distances, static_cast<T>(params.margin), in.swap);
  if (forms) {
    const bool inactive = is_inactive(unclamped);
    const auto c = coefficients<norm>(row_upstream(upstream, params.reduction, in.rows), state,
                                      unclamped, in.swap);
    const TripletPart<scalar, whole> part(in, row, 0, walk.segment_size);
    for_each_offset<scalar>(walk, part, thread, [&](int i, int offset) {
      store_gradients<norm>(in, gradients, row, part, offset, inactive, slots.get(slot + i),
                            state.distances, c);
    });
  }
  if (thread != 0) return 0;
  if (params.state != nullptr) {
    store_row_state<norm>(state, in.swap,
                          static_cast<T*>(params.state) + row * state_columns(norm, in.swap));
  }
  const T loss = clamped_loss(unclamped);
  if (params.reduction == Reduction::none) store_loss<scalar>(params, row, loss);
  return loss;
}

// `gradients` are formed with what is remembered at place `guess`, which is 0 where there is none
// or threads do not hold whole rows.
template <typename scalar, Norm norm, bool whole>
__global__ void __launch_bounds__(kTripletLargestBlock,
                                  kTripletThreadsPerProcessor / kTripletLargestBlock)
    triplet_forward(const __grid_constant__ TripletForward params,
                    const __grid_constant__ TripletGradients gradients, int guess, TripletWalk walk,
                    TripletHandovers<norm, typename AccumulateType<scalar>::type> handovers) {
  using T = typename AccumulateType<scalar>::type;
  using Part = TripletPart<scalar, whole>;
  extern __shared__ uint4 slot_memory[];
  __shared__ Distances<norm, T> shared[kMaxTripletWarps];
  const TripletSlots<scalar> slots{reinterpret_cast<Packed<scalar>*>(slot_memory)};
  const TripletInputs& in = params.inputs;
  const int thread = threadIdx.x % walk.threads_per_row;
  const int group = threadIdx.x / walk.threads_per_row;
  const int groups = blockDim.x / walk.threads_per_row;
  const int chunk_size = walk.threads_per_row * walk.accesses * kAccessWidth<scalar>;
  const int64_t begin = blockIdx.x * walk.segment_size;
  const int64_t end = begin + walk.segment_size;

  TripletGuess remembered{};
  if (guess != 0) remembered = triplet_guesses[guess];
  const double upstream = remembered.known ? remembered.last : 1;
  const bool forms = guess != 0 && !remembered.surprised;
  if (params.header != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    *params.header = {upstream, forms, guess};
  }

  // A chunk of each group's row; `first_row` is that of the block's first group.
  struct Place {
    int64_t first_row;
    int64_t chunk;
  };
  const Place start{int64_t{blockIdx.y} * groups, begin};
  const auto advance = [&](Place& place) {
    place.chunk += chunk_size;
    if (place.chunk < end) return;
    place = {place.first_row + int64_t{gridDim.y} * groups, begin};
  };
  const auto for_each_access = [&](const Place& place, auto visit) {
    if (place.first_row + group >= in.rows) return;
    const Part part(in, place.first_row + group, place.chunk,
                    min(int64_t{chunk_size}, end - place.chunk));
    for_each_offset<scalar>(walk, part, thread, [&](int i, int offset) { visit(part, offset, i); });
  };
  const auto fetch = [&](const Place& place, int stage) {
    for_each_access(place, [&](const Part& part, int offset, int i) {
      slots.fetch(part, offset, stage * walk.accesses + i);
    });
    __pipeline_commit();
  };

  Place ahead = start;
  for (int stage = 0; stage < walk.stages; ++stage) {
    fetch(ahead, stage);
    advance(ahead);
  }
  T loss = 0;
  int stage = 0;
  Distances<norm, T> distances;
  // The bound is the block's, not the group's: every thread takes part in a reduction.
  for (Place place = start; place.first_row < in.rows; advance(place)) {
    const int64_t row = place.first_row + group;
    const int slot = stage * walk.accesses;
    if (walk.stages == 1) {
      __pipeline_wait_prior(0);
    } else {
      __pipeline_wait_prior(1);
    }
    for_each_access(place, [&](const Part& part, int offset, int i) {
      distances.add(slots.get(slot + i), part, offset, static_cast<T>(in.eps), in.swap);
    });
    if (place.chunk + chunk_size >= end) {
      distances = reduce_group(distances, walk.threads_per_row, shared);
      if ((gridDim.x == 1 || gather_segments(handovers, row, distances, shared)) && row < in.rows) {
        loss += finish_row<norm, scalar, whole>(params, gradients, forms, static_cast<T>(upstream),
                                                row, walk, thread, distances, slots, slot);
      }
      distances = {};
    }
    fetch(ahead, stage);
    advance(ahead);
    stage = walk.stages - 1 - stage;
  }
  if (params.reduction != Reduction::none && blockIdx.x == gridDim.x - 1) {
    add_losses<scalar>(params, loss, handovers);
  }
}

// The upstream gradient of the loss, or with Reduction::none that of a row's.
template <typename scalar, typename T>
__device__ inline T load_upstream(const TripletBackward& params, int64_t row) {
  const int64_t index = row * params.grad_loss_stride;
  return params.accumulate_loss
             ? static_cast<const T*>(params.grad_loss)[index]
             : static_cast<T>(to_accumulate(static_cast<const scalar*>(params.grad_loss)[index]));
}

__device__ inline bool same_bits(double a, double b) {
  return __double_as_longlong(a) == __double_as_longlong(b);
}

// Writes down the upstream gradient for the next forward.
__device__ inline void remember(double upstream, int guess) {
  TripletGuess& place = triplet_guesses[guess];
  const double expected = place.known ? place.last : 1;
  place = {upstream, 1, !same_bits(upstream, expected)};
}

// `header` is the forward's where the gradients may have been formed by it, or else null.
template <typename scalar, Norm norm, bool whole>
__global__ void __launch_bounds__(kTripletLargestBlock)
    triplet_backward(const __grid_constant__ TripletBackward params,
                     const TripletStateHeader* header, int threads_per_row, int64_t segment_size) {
  using T = typename AccumulateType<scalar>::type;
  const TripletInputs& in = params.inputs;
  const auto is_formed = [&](T upstream) {
    return header != nullptr && header->formed && same_bits(upstream, header->upstream);
  };
  if (header != nullptr) {
    const T upstream = load_upstream<scalar, T>(params, 0);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && header->guess != 0) {
      remember(upstream, header->guess);
    }
    if (params.grad_loss_stride == 0 && is_formed(upstream)) return;
  }
  const int thread = threadIdx.x % threads_per_row;
  const int groups = blockDim.x / threads_per_row;
  const int64_t begin = blockIdx.x * segment_size;
  for (int64_t row = int64_t{blockIdx.y} * groups + threadIdx.x / threads_per_row; row < in.rows;
       row += int64_t{gridDim.y} * groups) {
    const T upstream = load_upstream<scalar, T>(params, row);
    if (is_formed(upstream)) continue;
    const auto state = load_row_state<norm>(
        static_cast<const T*>(params.state) + row * state_columns(norm, in.swap), in.swap);
    const T unclamped = unclamped_loss(state.distances, static_cast<T>(params.margin), in.swap);
    const auto c = coefficients<norm>(row_upstream(upstream, params.reduction, in.rows), state,
                                      unclamped, in.swap);
    const int step = threads_per_row * kAccessWidth<scalar>;
    for (int64_t chunk = begin; chunk < begin + segment_size; chunk += kBackwardChunk) {
      const int64_t size = min(int64_t{kBackwardChunk}, begin + segment_size - chunk);
      const TripletPart<scalar, whole> part(in, row, chunk, size);
      for (int offset = thread * kAccessWidth<scalar>; part.reaches(offset); offset += step) {
        TripletAccess<scalar> access;
        if (!is_inactive(unclamped)) access.load(part, offset);
        store_gradients<norm>(in, params.gradients, row, part, offset, is_inactive(unclamped),
                              access, state.distances, c);
      }
    }
  }
}

}  // namespace fused_ops
