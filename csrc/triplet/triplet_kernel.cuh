// SPDX-License-Identifier: BSD-3-Clause
// CUDA kernels of triplet_margin_loss.
//
// Both are bound by memory. The forward reads each input once; where its threads hold whole rows it
// can form the gradients too before they let go of them, with the upstream gradient last seen
// (triplet_guess.h). The backward has nothing left to do where that was the right one; elsewhere it
// reads the rows that are not inactive and writes the gradients, with the same bits. A group of
// threads takes a row; blocks stride over the rows (gridDim.y) and, where a row is shared, over its
// segments (gridDim.x). Reductions run in a fixed order and there are no atomics, so results repeat
// bit for bit. Odd rows that lie one behind another are triplet_tile_kernel.cuh's.
//
// triplet_forward   loss, state and perhaps gradients
// triplet_backward  gradients

#pragma once

#include "triplet/triplet_device.cuh"
#include "triplet/triplet_rows.cuh"

namespace fused_ops {

constexpr int kBackwardChunk = 1 << 30;  // elements of a row, whose offsets fit in 32 bits

// Adds an access. A zero in place of an element outside of the part adds nothing; nor does its tie
// with a maximum of 0 matter, for phi is 0 there.
template <Norm norm, typename scalar, bool whole, typename T>
__device__ inline void add_access(Distances<norm, T>& distances,
                                  const TripletAccess<scalar>& access,
                                  const TripletPart<scalar, whole>& part, int offset, T eps,
                                  bool swap) {
#pragma unroll
  for (int i = 0; i < kAccessWidth<scalar>; ++i) {
    const bool counts = part.contains(offset + i);
    const T a = to_accumulate(access.anchor.get(i));
    const T p = to_accumulate(access.positive.get(i));
    const T n = to_accumulate(access.negative.get(i));
    distances.positive.add(counts ? a - p + eps : T(0));
    distances.negative.add(counts ? a - n + eps : T(0));
    if (swap) distances.swap.add(counts ? p - n + eps : T(0));
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

  const TripletExpectation expected = expect_upstream(params, guess);

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
      add_access(distances, slots.get(slot + i), part, offset, static_cast<T>(in.eps), in.swap);
    });
    if (place.chunk + chunk_size >= end) {
      distances = reduce_group(distances, walk.threads_per_row, shared);
      if ((gridDim.x == 1 || gather_segments(handovers, row, distances, shared)) && row < in.rows) {
        loss += finish_row<norm, scalar>(
            params, expected.forms, static_cast<T>(expected.upstream), row, thread, distances,
            [&](bool inactive, const TripletDistances<T>& d, const TripletCoefficients<T>& c) {
              for_each_access(place, [&](const Part& part, int offset, int i) {
                store_gradients<norm>(in, gradients, row, part, offset, inactive,
                                      slots.get(slot + i), d, c);
              });
            });
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

// `header` is the forward's where the gradients may have been formed by it, or else null.
template <typename scalar, Norm norm, bool whole>
__global__ void __launch_bounds__(kTripletLargestBlock)
    triplet_backward(const __grid_constant__ TripletBackward params,
                     const TripletStateHeader* header, int threads_per_row, int64_t segment_size) {
  using T = typename AccumulateType<scalar>::type;
  const TripletInputs& in = params.inputs;
  if (all_are_formed<scalar, T>(params, header)) return;
  const int thread = threadIdx.x % threads_per_row;
  const int groups = blockDim.x / threads_per_row;
  const int64_t begin = blockIdx.x * segment_size;
  for (int64_t row = int64_t{blockIdx.y} * groups + threadIdx.x / threads_per_row; row < in.rows;
       row += int64_t{gridDim.y} * groups) {
    const T upstream = load_upstream<scalar, T>(params, row);
    if (is_formed(header, upstream)) continue;
    const auto known = load_row<norm>(params, row, upstream);
    const int step = threads_per_row * kAccessWidth<scalar>;
    for (int64_t chunk = begin; chunk < begin + segment_size; chunk += kBackwardChunk) {
      const int64_t size = min(int64_t{kBackwardChunk}, begin + segment_size - chunk);
      const TripletPart<scalar, whole> part(in, row, chunk, size);
      for (int offset = thread * kAccessWidth<scalar>; part.reaches(offset); offset += step) {
        TripletAccess<scalar> access;
        if (!known.inactive) access.load(part, offset);
        store_gradients<norm>(in, params.gradients, row, part, offset, known.inactive, access,
                              known.distances, known.coefficients);
      }
    }
  }
}

}  // namespace fused_ops
