// SPDX-License-Identifier: BSD-3-Clause
// CUDA kernels of triplet_margin_loss for short rows that lie one behind another.
//
// Such inputs are flat memory: a block brings a tile of rows to shared memory in whole accesses of
// 16 bytes, wherever rows start and end; only there do threads divide it into rows. Gradients take
// the place of what they are formed from, and leave as the tile came. What triplet_kernel.cuh says
// of reductions and of guessed gradients holds here too.
//
// An access to shared memory takes `width` elements: 16 bytes where rows consist of such, or else
// one. Odd rows with a thread each, or a warp, then spread over all banks.
//
// triplet_tile_forward   loss, state and perhaps gradients
// triplet_tile_backward  gradients

#pragma once

#include <cuda_pipeline_primitives.h>

#include "triplet/triplet_device.cuh"

namespace fused_ops {

// How threads share a tile.
struct TripletTileWalk {
  int rows;  // of a tile, a multiple of the block's groups
  int threads_per_row;
};

// `rows` rows from `first_row` on, those of the last tile fewer than memory is for.
template <typename scalar>
struct TripletTile {
  scalar* memory[3];  // (rows, dim) of anchor, positive and negative
  int64_t first_row;
  int rows;
  int dim;

  __device__ TripletTile(const TripletInputs& in, const TripletTileWalk& walk, void* shared,
                         int64_t index)
      : first_row(index * walk.rows),
        rows(static_cast<int>(min(int64_t{walk.rows}, in.rows - first_row))),
        dim(static_cast<int>(in.dim)) {
#pragma unroll
    for (int i = 0; i < 3; ++i) memory[i] = static_cast<scalar*>(shared) + i * walk.rows * dim;
  }

  // Tiles start on 16-byte boundaries, and all but the last one end there.
  __device__ void fetch(const TripletInputs& in) const {
    constexpr int width = kTripletAccessBytes / sizeof(scalar);
    const void* const inputs[] = {in.anchor, in.positive, in.negative};
    const int size = rows * dim;
    const int rest = size - size % width;
#pragma unroll
    for (int input = 0; input < 3; ++input) {
      const scalar* from = static_cast<const scalar*>(inputs[input]) + first_row * dim;
      scalar* to = memory[input];
#pragma unroll 4
      for (int i = threadIdx.x * width; i < rest; i += blockDim.x * width) {
        __pipeline_memcpy_async(to + i, from + i, kTripletAccessBytes);
      }
      for (int i = rest + threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
  }

  // Stores the gradients that have taken the inputs' place.
  __device__ void store(const TripletGradients& gradients) const {
    constexpr int width = kTripletAccessBytes / sizeof(scalar);
    void* const outputs[] = {gradients.anchor, gradients.positive, gradients.negative};
    const int size = rows * dim;
    const int rest = size - size % width;
    __syncthreads();
#pragma unroll
    for (int output = 0; output < 3; ++output) {
      if (outputs[output] == nullptr) continue;
      scalar* to = static_cast<scalar*>(outputs[output]) + first_row * dim;
      const scalar* from = memory[output];
#pragma unroll 4
      for (int i = threadIdx.x * width; i < rest; i += blockDim.x * width) {
        Packed<scalar>::load(from + i).store(to + i);
      }
      for (int i = rest + threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
    }
  }
};

// The part of a row in shared memory that is one thread's.
template <typename scalar, int width>
struct TripletTileRow {
  static constexpr int kBatch =
      width == 1 ? 4 : 1;  // accesses that are loaded before the first use
  scalar *anchor, *positive, *negative;
  int dim, begin, step;

  __device__ TripletTileRow(const TripletTile<scalar>& tile, int row, int thread, int threads)
      : anchor(tile.memory[0] + row * tile.dim),
        positive(tile.memory[1] + row * tile.dim),
        negative(tile.memory[2] + row * tile.dim),
        dim(tile.dim),
        begin(thread * width),
        step(threads * width) {}

  // Calls `visit(offset, a, p, n)` with each access.
  template <typename Visit>
  __device__ void for_each_access(Visit visit) const {
    using Access = Vector<scalar, width>;
    int offset = begin;
    for (; offset + (kBatch - 1) * step < dim; offset += kBatch * step) {
      Access a[kBatch], p[kBatch], n[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        a[i] = load<width>(anchor + offset + i * step);
        p[i] = load<width>(positive + offset + i * step);
        n[i] = load<width>(negative + offset + i * step);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) visit(offset + i * step, a[i], p[i], n[i]);
    }
    if constexpr (kBatch > 1) {
      for (; offset < dim; offset += step) {
        visit(offset, load<width>(anchor + offset), load<width>(positive + offset),
              load<width>(negative + offset));
      }
    }
  }

  template <Norm norm, typename T>
  __device__ void add_to(Distances<norm, T>& distances, T eps, bool swap) const {
    for_each_access([&](int, const auto& a, const auto& p, const auto& n) {
#pragma unroll
      for (int i = 0; i < width; ++i) {
        distances.add(to_accumulate(a.value[i]), to_accumulate(p.value[i]),
                      to_accumulate(n.value[i]), eps, swap);
      }
    });
  }

  // Puts the gradients in the inputs' place.
  template <Norm norm, typename T>
  __device__ void form(bool inactive, T eps, bool swap, const TripletDistances<T>& d,
                       const TripletCoefficients<T>& c) const {
    for_each_access([&](int offset, auto a, auto p, auto n) {
#pragma unroll
      for (int i = 0; i < width; ++i) {
        TripletElementGradient<T> gradient{};
        if (!inactive) {
          gradient = element_gradient<norm>(to_accumulate(a.value[i]), to_accumulate(p.value[i]),
                                            to_accumulate(n.value[i]), eps, swap, d, c);
        }
        a.value[i] = from_accumulate<scalar>(gradient.anchor);
        p.value[i] = from_accumulate<scalar>(gradient.positive);
        n.value[i] = from_accumulate<scalar>(gradient.negative);
      }
      ::fused_ops::store(anchor + offset, a);
      ::fused_ops::store(positive + offset, p);
      ::fused_ops::store(negative + offset, n);
    });
  }
};

// As triplet_forward.
template <typename scalar, Norm norm, int width>
__global__ void __launch_bounds__(kTripletTileThreads,
                                  kTripletThreadsPerProcessor / kTripletTileThreads)
    triplet_tile_forward(const __grid_constant__ TripletForward params,
                         const __grid_constant__ TripletGradients gradients, int guess,
                         TripletTileWalk walk,
                         TripletHandovers<norm, typename AccumulateType<scalar>::type> handovers) {
  using T = typename AccumulateType<scalar>::type;
  extern __shared__ uint4 tile_memory[];
  const TripletInputs& in = params.inputs;
  const int thread = threadIdx.x % walk.threads_per_row;
  const int groups = blockDim.x / walk.threads_per_row;
  const TripletExpectation expected = expect_upstream(params, guess);
  T loss = 0;
  for (int64_t index = blockIdx.y; index * walk.rows < in.rows; index += gridDim.y) {
    const TripletTile<scalar> tile(in, walk, tile_memory, index);
    tile.fetch(in);
    // Every thread takes part in a reduction, also where the last tile has no row for it.
    for (int row = threadIdx.x / walk.threads_per_row; row < walk.rows; row += groups) {
      const TripletTileRow<scalar, width> elements(tile, row, thread, walk.threads_per_row);
      Distances<norm, T> distances;
      if (row < tile.rows) elements.add_to(distances, static_cast<T>(in.eps), in.swap);
      distances = reduce_group<Distances<norm, T>>(distances, walk.threads_per_row, nullptr);
      if (row >= tile.rows) continue;
      loss += finish_row<norm, scalar>(
          params, expected.forms, static_cast<T>(expected.upstream), tile.first_row + row, thread,
          distances,
          [&](bool inactive, const TripletDistances<T>& d, const TripletCoefficients<T>& c) {
            elements.template form<norm>(inactive, static_cast<T>(in.eps), in.swap, d, c);
          });
    }
    if (expected.forms) tile.store(gradients);
    __syncthreads();  // until the tile is read
  }
  if (params.reduction != Reduction::none) add_losses<scalar>(params, loss, handovers);
}

// As triplet_backward.
template <typename scalar, Norm norm, int width>
__global__ void __launch_bounds__(kTripletTileThreads,
                                  kTripletThreadsPerProcessor / kTripletTileThreads)
    triplet_tile_backward(const __grid_constant__ TripletBackward params,
                          const TripletStateHeader* header, TripletTileWalk walk) {
  using T = typename AccumulateType<scalar>::type;
  extern __shared__ uint4 tile_memory[];
  const TripletInputs& in = params.inputs;
  if (all_are_formed<scalar, T>(params, header)) return;
  const int thread = threadIdx.x % walk.threads_per_row;
  const int groups = blockDim.x / walk.threads_per_row;
  for (int64_t index = blockIdx.y; index * walk.rows < in.rows; index += gridDim.y) {
    const TripletTile<scalar> tile(in, walk, tile_memory, index);
    tile.fetch(in);
    for (int row = threadIdx.x / walk.threads_per_row; row < tile.rows; row += groups) {
      const int64_t matrix_row = tile.first_row + row;
      const auto known =
          load_row<norm>(params, matrix_row, load_upstream<scalar, T>(params, matrix_row));
      const TripletTileRow<scalar, width> elements(tile, row, thread, walk.threads_per_row);
      elements.template form<norm>(known.inactive, static_cast<T>(in.eps), in.swap, known.distances,
                                   known.coefficients);
    }
    tile.store(params.gradients);
    __syncthreads();  // until the tile is read
  }
}

}  // namespace fused_ops
