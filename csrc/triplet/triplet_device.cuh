// SPDX-License-Identifier: BSD-3-Clause
// What the CUDA kernels of triplet_margin_loss do once a row's elements are at hand: sums, losses,
// gradients, and what blocks leave to each other.

#pragma once

#include "common/device/handover.cuh"
#include "common/device/reduce.cuh"
#include "common/device/vector.cuh"
#include "triplet/triplet_formula.h"
#include "triplet/triplet_guess.h"
#include "triplet/triplet_tuning.h"

namespace fused_ops {

constexpr int kMaxTripletWarps = kTripletLargestBlock / kWarpSize;

static __device__ TripletGuess triplet_guesses[kTripletGuesses];

// Where this thread stands in its block, whose groups of `size` threads take a row each.
struct TripletGroup {
  int size;
  int thread;  // in the group
  int index;   // of the group in the block
  int count;   // of groups

  // A power of two, so that it need not be divided by.
  __device__ explicit TripletGroup(int size) : size(size), thread(threadIdx.x & (size - 1)) {
    const int shift = __ffs(size) - 1;
    index = threadIdx.x >> shift;
    count = blockDim.x >> shift;
  }
};

// |x|_p while elements come in; for p = inf also how many attain the maximum.
template <Norm norm, typename T>
struct Distance {
  T value{};

  __device__ void add(T x) {
    if constexpr (norm == Norm::two) value = fma(x, x, value);
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

template <Norm norm, typename T, bool with_swap = true>
struct Distances {
  Distance<norm, T> positive;
  Distance<norm, T> negative;
  Distance<norm, T> swap;  // stays 0 without the swap

  __device__ void add(T a, T p, T n, T eps) {
    positive.add(a - p + eps);
    negative.add(a - n + eps);
    if constexpr (with_swap) swap.add(p - n + eps);
  }
  __device__ void merge(const Distances& other) {
    positive.merge(other.positive);
    negative.merge(other.negative);
    if constexpr (with_swap) swap.merge(other.swap);
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

template <Norm norm, typename T, bool with_swap>
__device__ inline Distances<norm, T, with_swap> shuffle_xor(const Distances<norm, T, with_swap>& d,
                                                            int mask) {
  Distances<norm, T, with_swap> other{
      shuffle_xor(d.positive, mask), shuffle_xor(d.negative, mask), {}};
  if constexpr (with_swap) other.swap = shuffle_xor(d.swap, mask);
  return other;
}

template <typename scalar, typename T>
__device__ inline void store_loss(const TripletForward& params, int64_t index, T loss) {
  if (params.accumulate_loss) {
    static_cast<T*>(params.loss)[index] = loss;
  } else {
    static_cast<scalar*>(params.loss)[index] = from_accumulate<scalar>(loss);
  }
}

// The upstream gradient of a row's loss, from that of the loss.
template <typename T>
__device__ inline T row_upstream(T upstream, Reduction reduction, int64_t rows) {
  return reduction == Reduction::mean ? upstream / static_cast<T>(rows) : upstream;
}

// What the forward's blocks leave to each other. `segments` is (rows, gridDim.x) and unused where
// gridDim.x is 1; `sums` has gridDim.y elements. With and without the swap Distances have one size.
template <Norm norm, typename T>
struct TripletHandovers {
  Handover<Distances<norm, T>>* segments;
  Handover<Sum<double>>* sums;
  uint64_t ticket;
  double share;  // what the sum of the losses counts; multiplied with, for a division takes long
};

// The distances of a whole row in the block of its last segment; elsewhere they are handed over and
// the result is false.
template <Norm norm, typename T, bool with_swap>
__device__ inline bool gather_segments(const TripletHandovers<norm, T>& handovers, int64_t row,
                                       Distances<norm, T, with_swap>& distances,
                                       Distances<norm, T, with_swap>* shared) {
  using Segment = Handover<Distances<norm, T, with_swap>>;
  auto* segments = reinterpret_cast<Segment*>(handovers.segments + row * gridDim.x);
  if (blockIdx.x != gridDim.x - 1) {
    if (threadIdx.x == 0) hand_over(&segments[blockIdx.x], distances, handovers.ticket);
    return false;
  }
  Distances<norm, T, with_swap> all;
  if (threadIdx.x == 0) all = distances;
  receive_all(segments, gridDim.x - 1, handovers.ticket,
              [&](const Distances<norm, T, with_swap>& segment) { all.merge(segment); });
  distances = reduce_group(all, blockDim.x, shared);
  return true;
}

// Adds the losses of all blocks in the last one. Losses are added in float64 from the first row on:
// alike ones are rounded alike, and float32 would lose a digit over hundreds of a thread's rows.
template <typename scalar, Norm norm, typename T>
__device__ inline void add_losses(const TripletForward& params, double loss,
                                  const TripletHandovers<norm, T>& handovers) {
  __shared__ Sum<double> shared[kMaxTripletWarps];
  const Sum<double> sum = reduce_group(Sum<double>{loss}, blockDim.x, shared);
  if (blockIdx.y != gridDim.y - 1) {
    if (threadIdx.x == 0) hand_over(&handovers.sums[blockIdx.y], sum, handovers.ticket);
    return;
  }
  Sum<double> total;
  if (threadIdx.x == 0) total = sum;
  receive_all(handovers.sums, gridDim.y - 1, handovers.ticket,
              [&](const Sum<double>& of_block) { total.merge(of_block); });
  total = reduce_group(total, blockDim.x, shared);
  if (threadIdx.x != 0) return;
  store_loss<scalar>(params, 0, static_cast<T>(total.value * handovers.share));
}

template <typename T>
struct TripletElementGradient {
  T anchor, positive, negative;
};

// The gradients of one element of each input.
template <Norm norm, typename T>
__device__ inline TripletElementGradient<T> element_gradient(T a, T p, T n, T eps, bool swap,
                                                             const TripletDistances<T>& d,
                                                             const TripletCoefficients<T>& c) {
  const T u = scaled_phi<norm>(a - p + eps, d.positive, c.positive);
  const T v = scaled_phi<norm>(a - n + eps, d.negative, c.negative);
  const T w = swap ? scaled_phi<norm>(p - n + eps, d.swap, c.swap) : T(0);
  return {u + v, w - u, -v - w};
}

// What threads do that form no gradients.
struct FormNothing {
  template <typename... Arguments>
  __device__ void operator()(const Arguments&...) const {}
};

// Finishes a row whose distances all threads of its group hold: its state and its loss, which is
// returned in the group's first thread. Before, `form(inactive, distances, coefficients)` is called
// if the row's gradients are to be formed.
template <Norm norm, typename scalar, typename T, bool with_swap, typename Form = FormNothing>
__device__ inline T finish_row(const TripletForward& params, int64_t row, int thread,
                               const Distances<norm, T, with_swap>& d, bool forms = false,
                               T upstream = 0, Form form = {}) {
  const TripletInputs& in = params.inputs;
  TripletRowState<T> state{
      {d.positive.result(), d.negative.result(), in.swap ? d.swap.result() : T(0)}, {}};
  if constexpr (norm == Norm::infinity) {
    state.ties = {static_cast<T>(d.positive.ties), static_cast<T>(d.negative.ties),
                  static_cast<T>(d.swap.ties)};
  }
  const T unclamped = unclamped_loss(state.distances, static_cast<T>(params.margin), in.swap);
  if (forms) {
    form(is_inactive(unclamped), state.distances,
         coefficients<norm>(row_upstream(upstream, params.reduction, in.rows), state, unclamped,
                            in));
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

// What the forward knows of the upstream gradient before it is seen.
struct TripletExpectation {
  double upstream;
  bool forms;  // whether gradients are to be formed with it
};

// What is remembered at place `guess`, which is 0 for nowhere. It is written into the state too.
__device__ inline TripletExpectation expect_upstream(const TripletForward& params, int guess) {
  TripletGuess remembered{};
  if (guess != 0) remembered = triplet_guesses[guess];
  const TripletExpectation expected{remembered.known ? remembered.last : 1,
                                    guess != 0 && !remembered.surprised};
  if (params.header != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    *params.header = {expected.upstream, expected.forms, guess};
  }
  return expected;
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

// Whether the forward has formed a row's gradients with the `upstream` that came. `header` is the
// forward's where it may have, or else null.
template <typename T>
__device__ inline bool is_formed(const TripletStateHeader* header, T upstream) {
  return header != nullptr && header->formed && same_bits(upstream, header->upstream);
}

// Whether it has formed those of every row. The upstream gradient is remembered.
template <typename scalar, typename T>
__device__ inline bool all_are_formed(const TripletBackward& params,
                                      const TripletStateHeader* header) {
  if (header == nullptr) return false;
  const T upstream = load_upstream<scalar, T>(params, 0);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && header->guess != 0) {
    remember(upstream, header->guess);
  }
  return params.grad_loss_stride == 0 && is_formed(header, upstream);
}

// A row as the backward finds it.
template <typename T>
struct TripletBackwardRow {
  bool inactive;
  TripletDistances<T> distances;
  TripletCoefficients<T> coefficients;
};

template <Norm norm, typename T>
__device__ inline TripletBackwardRow<T> load_row(const TripletBackward& params, int64_t row,
                                                 T upstream) {
  const TripletInputs& in = params.inputs;
  const auto state = load_row_state<norm>(
      static_cast<const T*>(params.state) + row * state_columns(norm, in.swap), in.swap);
  const T unclamped = unclamped_loss(state.distances, static_cast<T>(params.margin), in.swap);
  return {
      is_inactive(unclamped), state.distances,
      coefficients<norm>(row_upstream(upstream, params.reduction, in.rows), state, unclamped, in)};
}

}  // namespace fused_ops
