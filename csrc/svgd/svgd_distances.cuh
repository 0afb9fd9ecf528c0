// SPDX-License-Identifier: BSD-3-Clause
// Squared distances of a tile of particles, the one place where CUDA code computes them: every pass
// of the median and the update see the same bits.
//
// 256 threads form 16 x 16 groups; each thread holds an I x J patch of the tile in registers. The
// coordinates pass through shared memory a block of dimensions at a time.

#pragma once

#include "common/device/vector.cuh"
#include "svgd/svgd.h"

namespace fused_ops {

constexpr int kTileThreads = 256;
// Keeps rows of shared memory on different banks, and aligned for accesses of four elements.
constexpr int kTilePad = 4;

template <typename T, int rows>
struct alignas(kTilePad * sizeof(T)) CoordinateTile {
  T at[kDimBlock][rows + kTilePad];
};

// Coordinates [d, d + kDimBlock) of particles [first, first + rows), zero past either end.
template <int rows, typename T>
__device__ inline void load_coordinates(const SvgdParticles& particles, int64_t first, int64_t d,
                                        CoordinateTile<T, rows>& tile) {
  const auto* data = static_cast<const T*>(particles.data);
#pragma unroll
  for (int index = threadIdx.x; index < rows * kDimBlock; index += kTileThreads) {
    const int row = index / kDimBlock;
    const int k = index % kDimBlock;
    const bool inside = first + row < particles.count && d + k < particles.dim;
    tile.at[k][row] = inside ? data[(first + row) * particles.stride + d + k] : T(0);
  }
}

// distances[a][b] is that of particles first_i + I * (thread / 16) + a and
// first_j + J * (thread % 16) + b. All threads of the block must call it; it ends in a barrier.
template <int I, int J, typename T>
__device__ inline void tile_distances(const SvgdParticles& particles, int64_t first_i,
                                      int64_t first_j, CoordinateTile<T, 16 * I>& tile_i,
                                      CoordinateTile<T, 16 * J>& tile_j, T (&distances)[I][J]) {
  const int i = I * (threadIdx.x / 16);
  const int j = J * (threadIdx.x % 16);
#pragma unroll
  for (int a = 0; a < I; ++a) {
#pragma unroll
    for (int b = 0; b < J; ++b) distances[a][b] = T(0);
  }
  for (int64_t d = 0; d < particles.dim; d += kDimBlock) {
    load_coordinates<16 * I>(particles, first_i, d, tile_i);
    load_coordinates<16 * J>(particles, first_j, d, tile_j);
    __syncthreads();
    T sums[I][J] = {};
    const int64_t left = particles.dim - d;
    const int width = left < kDimBlock ? static_cast<int>(left) : kDimBlock;
#pragma unroll 4
    for (int k = 0; k < width; ++k) {
      const auto x_i = load<I>(&tile_i.at[k][i]);
      const auto x_j = load<J>(&tile_j.at[k][j]);
#pragma unroll
      for (int a = 0; a < I; ++a) {
#pragma unroll
        for (int b = 0; b < J; ++b) {
          const T difference = x_i.value[a] - x_j.value[b];
          sums[a][b] = fma(difference, difference, sums[a][b]);
        }
      }
    }
#pragma unroll
    for (int a = 0; a < I; ++a) {
#pragma unroll
      for (int b = 0; b < J; ++b) distances[a][b] += sums[a][b];
    }
    __syncthreads();
  }
}

// The same patch read from a stored (count, count) matrix of which the part on and above the
// diagonal is filled; zero past its end.
template <int I, int J, typename T>
__device__ inline void stored_distances(const T* matrix, int64_t count, int64_t first_i,
                                        int64_t first_j, T (&distances)[I][J]) {
  const int64_t i = first_i + I * (threadIdx.x / 16);
  const int64_t j = first_j + J * (threadIdx.x % 16);
  if (count % I == 0 && count % J == 0 && i < count && j < count && i + I <= j + 1) {
#pragma unroll
    for (int a = 0; a < I; ++a) {
      const auto row = load<J>(matrix + (i + a) * count + j);
#pragma unroll
      for (int b = 0; b < J; ++b) distances[a][b] = row.value[b];
    }
  } else if (count % I == 0 && count % J == 0 && i < count && j < count && j + J <= i + 1) {
#pragma unroll
    for (int b = 0; b < J; ++b) {
      const auto column = load<I>(matrix + (j + b) * count + i);
#pragma unroll
      for (int a = 0; a < I; ++a) distances[a][b] = column.value[a];
    }
  } else {
#pragma unroll
    for (int a = 0; a < I; ++a) {
#pragma unroll
      for (int b = 0; b < J; ++b) {
        const int64_t low = i + a < j + b ? i + a : j + b;
        const int64_t high = i + a < j + b ? j + b : i + a;
        distances[a][b] = high < count ? matrix[low * count + high] : T(0);
      }
    }
  }
}

// Stores a patch, and with `mirrored` its mirror image: distances are symmetric to the bit.
template <int I, int J, typename T>
__device__ inline void store_distances(T* matrix, int64_t count, int64_t first_i, int64_t first_j,
                                       const T (&distances)[I][J], bool mirrored) {
  const int64_t i = first_i + I * (threadIdx.x / 16);
  const int64_t j = first_j + J * (threadIdx.x % 16);
#pragma unroll
  for (int a = 0; a < I; ++a) {
#pragma unroll
    for (int b = 0; b < J; ++b) {
      if (i + a < count && j + b < count) {
        matrix[(i + a) * count + j + b] = distances[a][b];
        if (mirrored) matrix[(j + b) * count + i + a] = distances[a][b];
      }
    }
  }
}

// Fills a (count, count) matrix, a 64 x 64 tile on or above the diagonal to a block.
template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    svgd_distances(const __grid_constant__ SvgdParticles particles, T* matrix) {
  __shared__ CoordinateTile<T, 64> tile_i, tile_j;
  if (blockIdx.x < blockIdx.y) return;
  T distances[4][4];
  const int64_t first_i = int64_t{blockIdx.y} * 64;
  const int64_t first_j = int64_t{blockIdx.x} * 64;
  tile_distances(particles, first_i, first_j, tile_i, tile_j, distances);
  store_distances(matrix, particles.count, first_i, first_j, distances, true);
}

}  // namespace fused_ops
