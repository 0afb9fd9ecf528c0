// SPDX-License-Identifier: BSD-3-Clause
// CUDA kernels of triplet_margin_loss for odd rows that lie one behind another.
//
// Where rows do not start and end on 16-byte boundaries, inputs are taken as flat memory: a block
// brings a tile of rows to shared memory in whole accesses of 16 bytes, the next one while it is at
// work on another; only there do threads divide it into rows, element by element. Gradients take
// the place of what they are formed from, and leave as the tile came. What triplet_kernel.cuh says
// of reductions and of guessed gradients holds here too.
//
// triplet_tile_forward   loss, state and perhaps gradients
// triplet_tile_backward  gradients

#pragma once

#include <cuda_pipeline_primitives.h>

#include "common/device/wgmma.cuh"
#include "triplet/triplet_device.cuh"

namespace fused_ops {

// How threads share a tile.
struct TripletTileWalk {
  int rows;      // of a tile, a multiple of the block's groups
  int capacity;  // elements that the memory for each input has
  int threads_per_row;
  int stages;
  int flags;
};

// Up to `walk.rows` rows, in shared memory from `shift` on, as they are off a 16-byte boundary.
template <typename scalar>
struct TripletTile {
  static constexpr int kWidth = kTripletAccessBytes / sizeof(scalar);
  scalar* memory;  // (3, capacity): anchor, positive and negative
  int capacity;
  int64_t first_row;
  int64_t begin;  // the first element that memory holds
  int rows;
  int shift;
  int end;  // of the rows, in memory

  __device__ TripletTile(const TripletInputs& in, const TripletTileWalk& walk, int64_t first_row,
                         int64_t count, scalar* memory)
      : memory(memory),
        capacity(walk.capacity),
        first_row(first_row),
        rows(static_cast<int>(count)) {
    const int64_t first = first_row * in.dim;
    shift = static_cast<int>(first % kWidth);
    begin = first - shift;
    end = shift + rows * static_cast<int>(in.dim);
  }

  // Starts the copy of the rows, and of their neighbours in the same 16 bytes.
  __device__ void fetch(const TripletInputs& in, bool bulk, uint64_t* barrier) const {
    const int readable = static_cast<int>(min(int64_t{end} + kWidth, in.rows * in.dim - begin));
    const int rest = (min(end + kWidth - 1, readable)) / kWidth * kWidth;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (bulk && threadIdx.x == 0) {
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      barrier_expect(barrier, 3 * rest * static_cast<int>(sizeof(scalar)));
    }
#endif
    const auto copy = [&](const void* input, scalar* to) {
      const scalar* from = static_cast<const scalar*>(input) + begin;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
      if (bulk) {
        if (threadIdx.x == 0 && rest > 0) bulk_copy(to, from, rest * sizeof(scalar), barrier);
      } else
#endif
#pragma unroll 4
        for (int i = threadIdx.x * kWidth; i < rest; i += blockDim.x * kWidth) {
          __pipeline_memcpy_async(to + i, from + i, kTripletAccessBytes);
        }
      for (int i = rest + threadIdx.x; i < end; i += blockDim.x) to[i] = from[i];
    };
    copy(in.anchor, memory);
    copy(in.positive, memory + capacity);
    copy(in.negative, memory + 2 * capacity);
  }

  // Stores the gradients that have taken the inputs' place.
  __device__ void store(const TripletGradients& gradients, bool bulk) const {
    const int head = (shift + kWidth - 1) / kWidth * kWidth;
    const int rest = end / kWidth * kWidth;
    const auto copy = [&](void* gradient, const scalar* from) {
      if (gradient == nullptr) return;
      scalar* to = static_cast<scalar*>(gradient) + begin;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
      if (bulk) {
        if (threadIdx.x == 0 && rest > head) {
          asm volatile(
              "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + head),
              "r"(shared_address(from + head)), "r"((rest - head) * (int)sizeof(scalar))
              : "memory");
        }
      } else
#endif
#pragma unroll 4
        for (int i = head + threadIdx.x * kWidth; i < rest; i += blockDim.x * kWidth) {
          Packed<scalar>::load(from + i).store(to + i);
        }
      for (int i = shift + threadIdx.x; i < min(head, end); i += blockDim.x) to[i] = from[i];
      for (int i = max(head, rest) + threadIdx.x; i < end; i += blockDim.x) to[i] = from[i];
    };
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncthreads();
    copy(gradients.anchor, memory);
    copy(gradients.positive, memory + capacity);
    copy(gradients.negative, memory + 2 * capacity);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (bulk && threadIdx.x == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
  }

  __device__ scalar* row(int index, int64_t dim) const {
    return memory + shift + index * static_cast<int>(dim);
  }
};

// A thread's elements of a row.
template <typename scalar>
struct TripletTileRow {
  static constexpr int kBatch = 4;  // elements that are loaded before the first is used
  scalar* anchor;
  int capacity, dim, thread, threads;

  // Calls `visit(element, a, p, n)` with each.
  template <typename Visit>
  __device__ void for_each_element(Visit visit) const {
    scalar* element = anchor + thread;
    scalar* const end = anchor + dim;
    for (; element + (kBatch - 1) * threads < end; element += kBatch * threads) {
      scalar a[kBatch], p[kBatch], n[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        a[i] = element[i * threads];
        p[i] = element[i * threads + capacity];
        n[i] = element[i * threads + 2 * capacity];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) visit(element + i * threads, a[i], p[i], n[i]);
    }
    for (; element < end; element += threads) {
      visit(element, element[0], element[capacity], element[2 * capacity]);
    }
  }

  template <Norm norm, typename T>
  __device__ void add_to(Distances<norm, T>& distances, T eps, bool swap) const {
    for_each_element([&](scalar*, scalar a, scalar p, scalar n) {
      distances.add(to_accumulate(a), to_accumulate(p), to_accumulate(n), eps, swap);
    });
  }

  // Puts the gradients in the inputs' place.
  template <Norm norm, typename T>
  __device__ void form(bool inactive, T eps, bool swap, const TripletDistances<T>& d,
                       const TripletCoefficients<T>& c) const {
    for_each_element([&](scalar* element, scalar a, scalar p, scalar n) {
      TripletElementGradient<T> gradient{};
      if (!inactive) {
        gradient = element_gradient<norm>(to_accumulate(a), to_accumulate(p), to_accumulate(n), eps,
                                          swap, d, c);
      }
      element[0] = from_accumulate<scalar>(gradient.anchor);
      element[capacity] = from_accumulate<scalar>(gradient.positive);
      element[2 * capacity] = from_accumulate<scalar>(gradient.negative);
    });
  }
};

// Calls `work` with each of the block's tiles; the next one comes meanwhile.
template <typename scalar, typename Work>
__device__ inline void for_each_tile(const TripletInputs& in, const TripletTileWalk& walk,
                                     Work work) {
  extern __shared__ uint4 tile_memory[];
  __shared__ uint64_t barriers[8];
  const bool bulk = walk.flags & 1;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (threadIdx.x == 0) {
    for (int i = 0; i < walk.stages; ++i) barrier_create(&barriers[i], 1);
    barriers_created();
  }
  __syncthreads();
#endif
  const bool ranges = walk.flags & 4;
  const int64_t first = ranges ? in.rows * blockIdx.y / gridDim.y : int64_t{blockIdx.y} * walk.rows;
  const int64_t last = ranges ? in.rows * (blockIdx.y + 1) / gridDim.y : in.rows;
  const int64_t step = ranges ? walk.rows : int64_t{gridDim.y} * walk.rows;
  const auto tile_at = [&](int64_t row, int stage) {
    return TripletTile<scalar>(in, walk, row, min(last - row, int64_t{walk.rows}),
                               reinterpret_cast<scalar*>(tile_memory) + stage * 3 * walk.capacity);
  };
  const auto fetch = [&](int64_t row, int stage) {
    if (row < last) tile_at(row, stage).fetch(in, bulk, &barriers[stage]);
    __pipeline_commit();
  };
  int stage = 0, parity = 0;
  for (int i = 0; i + 1 < walk.stages; ++i) fetch(first + i * step, i);
  for (int64_t row = first; row < last; row += step) {
    fetch(row + (walk.stages - 1) * step, stage == 0 ? walk.stages - 1 : stage - 1);
    const TripletTile<scalar> tile = tile_at(row, stage);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (bulk) {
      barrier_wait(&barriers[stage], parity);
      if (tile.first_row + tile.rows == in.rows) __syncthreads();
    } else
#endif
    {
      __pipeline_wait_prior(walk.stages - 1);
      __syncthreads();
    }
    work(tile);
    __syncthreads();  // until the tile's memory is free
    if (++stage == walk.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

// As triplet_forward.
template <typename scalar, Norm norm>
__global__ void __launch_bounds__(kTripletLargestBlock,
                                  kTripletThreadsPerProcessor / kTripletLargestBlock)
    triplet_tile_forward(const __grid_constant__ TripletForward params,
                         const __grid_constant__ TripletGradients gradients, int guess,
                         TripletTileWalk walk,
                         TripletHandovers<norm, typename AccumulateType<scalar>::type> handovers) {
  using T = typename AccumulateType<scalar>::type;
  __shared__ Distances<norm, T> shared[kMaxTripletWarps];
  const TripletInputs& in = params.inputs;
  const int thread = threadIdx.x % walk.threads_per_row;
  const int groups = blockDim.x / walk.threads_per_row;
  const T eps = static_cast<T>(in.eps);
  const TripletExpectation expected = expect_upstream(params, guess);
  T loss = 0;
  for_each_tile<scalar>(in, walk, [&](const TripletTile<scalar>& tile) {
    // Every thread takes part in a reduction, also where the last tile has no row for it.
    for (int row = threadIdx.x / walk.threads_per_row; row < walk.rows; row += groups) {
      const TripletTileRow<scalar> elements{tile.row(row, in.dim), walk.capacity,
                                            row < tile.rows ? static_cast<int>(in.dim) : 0, thread,
                                            walk.threads_per_row};
      Distances<norm, T> distances;
      elements.add_to(distances, eps, in.swap);
      distances = reduce_group(distances, walk.threads_per_row, shared);
      if (row >= tile.rows) continue;
      loss += finish_row<norm, scalar>(
          params, expected.forms, static_cast<T>(expected.upstream), tile.first_row + row, thread,
          distances,
          [&](bool inactive, const TripletDistances<T>& d, const TripletCoefficients<T>& c) {
            elements.template form<norm>(inactive, eps, in.swap, d, c);
          });
    }
    if (expected.forms) tile.store(gradients, walk.flags & 2);
  });
  if (params.reduction != Reduction::none) add_losses<scalar>(params, loss, handovers);
}

// As triplet_backward.
template <typename scalar, Norm norm>
__global__ void __launch_bounds__(kTripletLargestBlock,
                                  kTripletThreadsPerProcessor / kTripletLargestBlock)
    triplet_tile_backward(const __grid_constant__ TripletBackward params,
                          const TripletStateHeader* header, TripletTileWalk walk) {
  using T = typename AccumulateType<scalar>::type;
  const TripletInputs& in = params.inputs;
  if (all_are_formed<scalar, T>(params, header)) return;
  const int thread = threadIdx.x % walk.threads_per_row;
  const int groups = blockDim.x / walk.threads_per_row;
  for_each_tile<scalar>(in, walk, [&](const TripletTile<scalar>& tile) {
    for (int row = threadIdx.x / walk.threads_per_row; row < tile.rows; row += groups) {
      const int64_t matrix_row = tile.first_row + row;
      const auto known =
          load_row<norm>(params, matrix_row, load_upstream<scalar, T>(params, matrix_row));
      const TripletTileRow<scalar> elements{tile.row(row, in.dim), walk.capacity,
                                            static_cast<int>(in.dim), thread, walk.threads_per_row};
      elements.template form<norm>(known.inactive, static_cast<T>(in.eps), in.swap, known.distances,
                                   known.coefficients);
    }
    tile.store(params.gradients, walk.flags & 2);
  });
}

}  // namespace fused_ops
