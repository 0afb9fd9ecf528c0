// SPDX-License-Identifier: BSD-3-Clause
// Which pairs a block of the small kernel owns, and their distances.
//
// The particles are cut into an even number of bands of `edge` = 16 * patch. A block holds one
// square tile of edge x edge distances in registers, patch x patch to a thread. Most blocks take a
// pair of different bands. The others take two bands each with themselves: the half of the tile
// above its diagonal is the first band's, the half below it the second's. So every pair i < j is
// computed once, and all blocks have the same work.

#pragma once

#include "svgd/svgd_distances.cuh"

namespace fused_ops {

// Marks places of a tile that are no pair i < j. Its bits are above those of any distance.
constexpr float kNoPair = -1.0f;

struct SmallTile {
  int bands[2];  // of the rows and of the columns; or two bands with themselves
  bool paired;   // the latter

  // A run-time index would put the bands in local memory.
  __device__ int band(bool second) const { return second ? bands[1] : bands[0]; }
};

__device__ inline SmallTile small_tile(int index, int bands) {
  const int mixed = bands * (bands - 1) / 2;
  if (index >= mixed) return {{2 * (index - mixed), 2 * (index - mixed) + 1}, true};
  int high = 1;
  while (high * (high + 1) / 2 <= index) ++high;
  return {{index - high * (high - 1) / 2, high}, false};
}

// `patch` neighbouring elements, in accesses of four where there are as many.
template <int patch>
__device__ inline void load_patch(const float* address, float (&values)[patch]) {
  constexpr int width = patch < 4 ? patch : 4;
#pragma unroll
  for (int first = 0; first < patch; first += width) {
    const auto part = load<width>(address + first);
#pragma unroll
    for (int i = 0; i < width; ++i) values[first + i] = part.value[i];
  }
}

template <int patch>
using SmallCoordinates = CoordinateTile<float, 16 * patch>[2];

// Adds the squared differences of one block of dimensions. Threads above the diagonal of a paired
// tile take both operands from the first band, threads below it from the second; the 16 threads on
// it need both, which `paired` provides for without a branch.
template <int patch, bool paired>
__device__ inline void add_differences(const SmallCoordinates<patch>& coordinates, int width,
                                       float (&distances)[patch][patch]) {
  const int row = threadIdx.x / 16;
  const int column = threadIdx.x % 16;
  const float* upper_i = &coordinates[paired && row > column].at[0][patch * row];
  const float* upper_j = &coordinates[!paired || row > column].at[0][patch * column];
  const float* lower_i = &coordinates[row >= column].at[0][patch * row];
  const float* lower_j = &coordinates[row >= column].at[0][patch * column];
  constexpr int stride = sizeof(coordinates[0].at[0]) / sizeof(float);
  float sums[patch][patch] = {};
#pragma unroll 4
  for (int k = 0; k < width; ++k) {
    float x_i[patch], x_j[patch], other_i[patch], other_j[patch];
    load_patch(upper_i + k * stride, x_i);
    load_patch(upper_j + k * stride, x_j);
    if constexpr (paired) {
      load_patch(lower_i + k * stride, other_i);
      load_patch(lower_j + k * stride, other_j);
    }
#pragma unroll
    for (int a = 0; a < patch; ++a) {
#pragma unroll
      for (int b = 0; b < patch; ++b) {
        const bool below = paired && a > b;
        const float difference = below ? other_i[a] - other_j[b] : x_i[a] - x_j[b];
        sums[a][b] = fma(difference, difference, sums[a][b]);
      }
    }
  }
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) distances[a][b] += sums[a][b];
  }
}

// distances[a][b] is that of rows patch * (thread / 16) + a and patch * (thread % 16) + b of the
// bands, with the bits of tile_distances; kNoPair where that is no pair. Ends in a barrier.
template <typename scalar, int patch>
__device__ inline void small_distances(const SvgdParticles& particles, const SmallTile& tile,
                                       SmallCoordinates<patch>& coordinates,
                                       float (&distances)[patch][patch]) {
  constexpr int edge = 16 * patch;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) distances[a][b] = 0;
  }
  const int dim = static_cast<int>(particles.dim);
  for (int d = 0; d < dim; d += kDimBlock) {
    load_coordinates<edge, scalar>(particles, tile.bands[0] * edge, d, coordinates[0]);
    load_coordinates<edge, scalar>(particles, tile.bands[1] * edge, d, coordinates[1]);
    __syncthreads();
    const int width = dim - d < kDimBlock ? dim - d : kDimBlock;
    if (tile.paired) {
      add_differences<patch, true>(coordinates, width, distances);
    } else {
      add_differences<patch, false>(coordinates, width, distances);
    }
    __syncthreads();
  }
  const int row = patch * (threadIdx.x / 16);
  const int column = patch * (threadIdx.x % 16);
  // Particles from the start of each band on.
  const int first_left = static_cast<int>(particles.count) - tile.bands[0] * edge;
  const int second_left = static_cast<int>(particles.count) - tile.bands[1] * edge;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      const int i = row + a;
      const int j = column + b;
      const bool pair = !tile.paired ? i < first_left && j < second_left
                        : i < j      ? j < first_left
                                     : j < i && i < second_left;
      if (!pair) distances[a][b] = kNoPair;
    }
  }
}

}  // namespace fused_ops
