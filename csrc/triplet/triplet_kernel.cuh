// SPDX-License-Identifier: BSD-3-Clause
// CUDA kernels of triplet_margin_loss.
//
// All are bound by memory. The forward reads each input once; where its threads can hold whole rows
// it can form the gradients too before they let go of them, with the upstream gradient last seen
// (triplet_guess.h). The backward has nothing left to do where that was the right one; elsewhere it
// reads the rows that are not inactive and writes the gradients, with the same bits. A group of
// threads takes a row; blocks stride over the rows (gridDim.y) and, where a row is shared, over its
// segments (gridDim.x). Reductions run in a fixed order and there are no atomics, so results repeat
// bit for bit. Odd rows that lie one behind another are triplet_tile_kernel.cuh's.
//
// triplet_forward                 loss and state
// triplet_forward_with_gradients  loss, state and gradients, unless none are to be formed
// triplet_backward                gradients
//
// A launch on a small input spends most of its time on instructions that every block runs once, so
// triplet_forward does no more than it must: it loads straight into registers, and the accesses of
// other threads are what hides its waiting. H200, in a CUDA graph, through registers and through
// shared memory: (4096, 128) float32 4.8 and 5.1 us, (8192, 768) bfloat16 9.5 and 10.3.

#pragma once

#include "triplet/triplet_device.cuh"
#include "triplet/triplet_rows.cuh"

namespace fused_ops {

constexpr int kTripletChunk = 1 << 30;  // elements of a row, whose offsets fit in 32 bits

// Adds an access. A zero in place of an element outside of the part adds nothing; nor does its tie
// with a maximum of 0 matter, for phi is 0 there.
template <Norm norm, typename scalar, bool whole, typename T, bool with_swap>
__device__ inline void add_access(Distances<norm, T, with_swap>& distances,
                                  const TripletAccess<scalar>& access,
                                  const TripletPart<scalar, whole>& part, int offset, T eps) {
#pragma unroll
  for (int i = 0; i < kAccessWidth<scalar>; ++i) {
    const bool counts = part.contains(offset + i);
    const T a = to_accumulate(access.anchor.get(i));
    const T p = to_accumulate(access.positive.get(i));
    const T n = to_accumulate(access.negative.get(i));
    distances.positive.add(counts ? a - p + eps : T(0));
    distances.negative.add(counts ? a - n + eps : T(0));
    if constexpr (with_swap) distances.swap.add(counts ? p - n + eps : T(0));
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
      const auto gradient = element_gradient<norm>(x, y, z, eps, in.swap, d, c);
      anchor.set(i, from_accumulate<scalar>(gradient.anchor));
      positive.set(i, from_accumulate<scalar>(gradient.positive));
      negative.set(i, from_accumulate<scalar>(gradient.negative));
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

// Accesses that come at once, as many as there are registers for.
template <Norm norm, typename T, bool whole, bool with_swap>
constexpr int kAccessesAtOnce = !whole || norm == Norm::infinity || sizeof(T) > 4 ? 2
                                : with_swap ? 3
                                            : kTripletAccesses;

// Adds a thread's accesses to a part.
template <Norm norm, typename scalar, bool whole, typename T, bool with_swap>
__device__ inline void add_part(Distances<norm, T, with_swap>& distances,
                                const TripletPart<scalar, whole>& part, const TripletGroup& group,
                                T eps) {
  constexpr int at_once = kAccessesAtOnce<norm, T, whole, with_swap>;
  const int step = group.size * kAccessWidth<scalar>;
#pragma unroll 1
  for (int offset = group.thread * kAccessWidth<scalar>; part.reaches(offset);
       offset += at_once * step) {
    TripletAccess<scalar> accesses[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (part.reaches(offset + i * step)) accesses[i].load(part, offset + i * step);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (!part.reaches(offset + i * step)) break;
      add_access(distances, accesses[i], part, offset + i * step, eps);
    }
  }
}

template <typename scalar, Norm norm, bool whole, bool with_swap>
__global__ void __launch_bounds__(kTripletLargestBlock,
                                  kTripletThreadsPerProcessor / kTripletLargestBlock)
    triplet_forward(const __grid_constant__ TripletForward params, int threads_per_row,
                    int64_t segment_size,
                    TripletHandovers<norm, typename AccumulateType<scalar>::type> handovers) {
  using T = typename AccumulateType<scalar>::type;
  __shared__ Distances<norm, T, with_swap> shared[kMaxTripletWarps];
  expect_upstream(params, 0);
  const TripletInputs& in = params.inputs;
  const TripletGroup group(threads_per_row);
  const int64_t begin = blockIdx.x * segment_size;
  const int64_t end = begin + segment_size;
  double loss = 0;
  // The bound is the block's, not the group's: every thread takes part in a reduction.
  for (int64_t first_row = int64_t{blockIdx.y} * group.count; first_row < in.rows;
       first_row += int64_t{gridDim.y} * group.count) {
    const int64_t row = first_row + group.index;
    Distances<norm, T, with_swap> distances;
    for (int64_t chunk = begin; row < in.rows && chunk < end; chunk += kTripletChunk) {
      const TripletPart<scalar, whole> part(in, row, chunk,
                                            min(int64_t{kTripletChunk}, end - chunk));
      add_part(distances, part, group, static_cast<T>(in.eps));
    }
    distances = reduce_group(distances, threads_per_row, shared);
    if ((gridDim.x == 1 || gather_segments(handovers, row, distances, shared)) && row < in.rows) {
      loss += finish_row<norm, scalar>(params, row, group.thread, distances);
    }
  }
  if (params.reduction != Reduction::none && blockIdx.x == gridDim.x - 1) {
    add_losses<scalar>(params, loss, handovers);
  }
}

// How the threads of triplet_forward_with_gradients walk, as its policy says.
struct TripletWalk {
  int threads_per_row;
  int accesses;
  int stages;
};

// The sum of the losses of the rows that this thread finishes. Where stages are two the next row
// comes into slots while threads are at work on one.
template <typename scalar, bool whole, Norm norm, typename T, bool with_swap>
__device__ inline double forward_held_rows(const TripletForward& params,
                                           const TripletGradients& gradients,
                                           const TripletExpectation& expected,
                                           const TripletWalk& walk,
                                           Distances<norm, T, with_swap>* shared) {
  using Part = TripletPart<scalar, whole>;
  // LDGSTS takes a fifth longer to fill memory that is off the boundaries of lines.
  extern __shared__ __align__(kTripletLine * kTripletAccessBytes) uint4 slot_memory[];
  const TripletSlots<scalar> slots(slot_memory, walk.accesses * walk.stages);
  const TripletInputs& in = params.inputs;
  const TripletGroup group(walk.threads_per_row);
  const int64_t stride = int64_t{gridDim.y} * group.count;

  const auto for_each_access = [&](int64_t row, auto visit) {
    if (row >= in.rows) return;
    const Part part(in, row, 0, walk.threads_per_row * walk.accesses * kAccessWidth<scalar>);
    const int step = walk.threads_per_row * kAccessWidth<scalar>;
    int offset = group.thread * kAccessWidth<scalar>;
#pragma unroll 1
    for (int first = 0; first < walk.accesses; first += kTripletAccesses) {
#pragma unroll
      for (int i = 0; i < kTripletAccesses; ++i, offset += step) visit(part, offset, first + i);
    }
  };
  const auto fetch = [&](int64_t row, int slot) {
    for_each_access(
        row, [&](const Part& part, int offset, int i) { slots.fetch(part, offset, slot + i); });
    __pipeline_commit();
  };

  int64_t first_row = int64_t{blockIdx.y} * group.count;
  int64_t ahead = first_row + group.index;
  for (int stage = 0; stage < walk.stages; ++stage, ahead += stride) {
    fetch(ahead, stage * walk.accesses);
  }
  double loss = 0;
  int stage = 0;
  for (; first_row < in.rows; first_row += stride, ahead += stride) {
    const int64_t row = first_row + group.index;
    const int slot = stage * walk.accesses;
    if (walk.stages == 1) {
      __pipeline_wait_prior(0);
    } else {
      __pipeline_wait_prior(1);
    }
    Distances<norm, T, with_swap> distances;
    for_each_access(row, [&](const Part& part, int offset, int i) {
      if (!part.reaches(offset)) return;
      add_access(distances, slots.get(slot + i), part, offset, static_cast<T>(in.eps));
    });
    distances = reduce_group(distances, walk.threads_per_row, shared);
    if (row < in.rows) {
      loss += finish_row<norm, scalar>(
          params, row, group.thread, distances, expected.forms, static_cast<T>(expected.upstream),
          [&](bool inactive, const TripletDistances<T>& d, const TripletCoefficients<T>& c) {
            for_each_access(row, [&](const Part& part, int offset, int i) {
              if (!part.reaches(offset)) return;
              store_gradients<norm>(in, gradients, row, part, offset, inactive, slots.get(slot + i),
                                    d, c);
            });
          });
    }
    fetch(ahead, slot);
    stage = walk.stages - 1 - stage;
  }
  return loss;
}

// `gradients` are formed with what is remembered at place `guess`, where that is worth it.
template <typename scalar, Norm norm, bool whole>
__global__ void __launch_bounds__(kTripletLargestBlock,
                                  kTripletThreadsPerProcessor / kTripletLargestBlock)
    triplet_forward_with_gradients(
        const __grid_constant__ TripletForward params,
        const __grid_constant__ TripletGradients gradients, int guess, TripletWalk walk,
        TripletHandovers<norm, typename AccumulateType<scalar>::type> handovers) {
  using T = typename AccumulateType<scalar>::type;
  __shared__ Distances<norm, T, true> with_swap[kMaxTripletWarps];
  __shared__ Distances<norm, T, false> without_swap[kMaxTripletWarps];
  const TripletExpectation expected = expect_upstream(params, guess);
  const double loss =
      params.inputs.swap
          ? forward_held_rows<scalar, whole>(params, gradients, expected, walk, with_swap)
          : forward_held_rows<scalar, whole>(params, gradients, expected, walk, without_swap);
  if (params.reduction != Reduction::none) add_losses<scalar>(params, loss, handovers);
}

// `header` is the forward's where the gradients may have been formed by it, or else null.
template <typename scalar, Norm norm, bool whole>
__global__ void __launch_bounds__(kTripletLargestBlock)
    triplet_backward(const __grid_constant__ TripletBackward params,
                     const TripletStateHeader* header, int threads_per_row, int64_t segment_size) {
  using T = typename AccumulateType<scalar>::type;
  const TripletInputs& in = params.inputs;
  if (all_are_formed<scalar, T>(params, header)) return;
  const TripletGroup group(threads_per_row);
  const int64_t begin = blockIdx.x * segment_size;
  for (int64_t row = int64_t{blockIdx.y} * group.count + group.index; row < in.rows;
       row += int64_t{gridDim.y} * group.count) {
    const T upstream = load_upstream<scalar, T>(params, row);
    if (is_formed(header, upstream)) continue;
    const auto known = load_row<norm>(params, row, upstream);
    const int step = threads_per_row * kAccessWidth<scalar>;
    for (int64_t chunk = begin; chunk < begin + segment_size; chunk += kTripletChunk) {
      const int64_t size = min(int64_t{kTripletChunk}, begin + segment_size - chunk);
      const TripletPart<scalar, whole> part(in, row, chunk, size);
      for (int offset = group.thread * kAccessWidth<scalar>; part.reaches(offset); offset += step) {
        TripletAccess<scalar> access;
        if (!known.inactive) access.load(part, offset);
        store_gradients<norm>(in, params.gradients, row, part, offset, known.inactive, access,
                              known.distances, known.coefficients);
      }
    }
  }
}

}  // namespace fused_ops
