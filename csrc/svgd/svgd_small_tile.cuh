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

// More would be more blocks than any GPU has multiprocessors.
constexpr int kMaxBands = 16;

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

// Coordinates of a band, [dimension][place of the row].
template <int patch>
using SmallBand = CoordinateTile<float, 16 * patch>;
template <int patch>
using SmallCoordinates = SmallBand<patch>[2];

// In patches of eight the first fours of all rows come before the second ones: neighbouring threads
// then read neighbouring fours, on different banks.
template <int patch>
__device__ inline int row_place(int row) {
  return patch < 8 ? row : row / 4 % 2 * (8 * patch) + row / 8 * 4 + row % 4;
}

template <int patch>
__device__ inline void load_rows(const float* line, int thread, float (&values)[patch]) {
  if constexpr (patch < 8) {
    load_patch(line + patch * thread, values);
  } else {
    static_assert(patch == 8);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const auto four = load<4>(line + part * (8 * patch) + 4 * thread);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[4 * part + i] = four.value[i];
    }
  }
}

// One block of dimensions of both bands on its way from device to shared memory: all its loads are
// under way at once. A warp takes eight dimensions of four rows, which it stores to 32 banks.
template <int patch>
struct SmallFetch {
  static constexpr int rows_per_thread = 2 * patch;
  float values[2][rows_per_thread];

  static __device__ int dimension() { return threadIdx.x / 32 % 4 * 8 + threadIdx.x % 8; }
  static __device__ int row(int i) {
    return 8 * i + threadIdx.x / 128 * 4 + threadIdx.x % 32 / 8;
  }

  template <typename scalar>
  __device__ void load(const SvgdParticles& particles, const SmallTile& tile, int d) {
    const auto* data = static_cast<const scalar*>(particles.data) + d + dimension();
    const bool inside = d + dimension() < particles.dim;
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < rows_per_thread; ++i) {
        const int64_t particle = tile.bands[band] * (16 * patch) + row(i);
        const bool present = inside && particle < particles.count;
        values[band][i] = present ? to_accumulate(data[particle * particles.stride]) : 0.0f;
      }
    }
  }

  __device__ void store(SmallCoordinates<patch>& coordinates) const {
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < rows_per_thread; ++i) {
        coordinates[band].at[dimension()][row_place<patch>(row(i))] = values[band][i];
      }
    }
  }
};

// Adds the squared differences of one block of dimensions. Threads above the diagonal of a paired
// tile take both operands from the first band, threads below it from the second. The 16 threads on
// it have both bands' share of the same rows: there rows are exchanged between the operands.
template <int patch, bool paired>
__device__ inline void add_differences(const SmallCoordinates<patch>& coordinates, int width,
                                       float (&distances)[patch][patch]) {
  const int row = threadIdx.x / 16;
  const int column = threadIdx.x % 16;
  const bool diagonal = paired && row == column;
  const float* line_i = coordinates[paired && row > column].at[0];
  const float* line_j = coordinates[!paired || row >= column].at[0];
  constexpr int stride = sizeof(coordinates[0].at[0]) / sizeof(float);
  float sums[patch][patch] = {};
  // Dimensions past the end are zero and add nothing.
  constexpr int unroll = 4;
  static_assert(kDimBlock % unroll == 0);
  for (int first = 0; first < width; first += unroll) {
#pragma unroll
    for (int k = first; k < first + unroll; ++k) {
      float x_i[patch], x_j[patch];
      load_rows(line_i + k * stride, row, x_i);
      load_rows(line_j + k * stride, column, x_j);
      float below_i[patch], above_j[patch];
#pragma unroll
      for (int a = 0; a < patch; ++a) {
        below_i[a] = diagonal ? x_j[a] : x_i[a];
        above_j[a] = diagonal ? x_i[a] : x_j[a];
      }
#pragma unroll
      for (int a = 0; a < patch; ++a) {
#pragma unroll
        for (int b = 0; b < patch; ++b) {
          const float difference =
              (paired && a > b ? below_i[a] : x_i[a]) - (paired && a < b ? above_j[b] : x_j[b]);
          sums[a][b] = fma(difference, difference, sums[a][b]);
        }
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
// bands, with the bits of tile_distances; kNoPair where that is no pair. `fetch` has loaded the
// first block of dimensions. Ends in a barrier.
template <typename scalar, int patch>
__device__ inline void small_distances(const SvgdParticles& particles, const SmallTile& tile,
                                       SmallFetch<patch>& fetch,
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
    fetch.store(coordinates);
    __syncthreads();
    const int width = dim - d < kDimBlock ? dim - d : kDimBlock;
    if (d + kDimBlock < dim) fetch.template load<scalar>(particles, tile, d + kDimBlock);
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
