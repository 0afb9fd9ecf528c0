// SPDX-License-Identifier: BSD-3-Clause
// Which pairs a block of the small kernel owns, and their distances.
//
// The particles are cut into an even number of bands of `edge` = 16 * size. A block holds one
// square tile of edge x edge distances in registers, a square patch to a thread. Most blocks take a
// pair of different bands. The others take two bands each with themselves: the half of the tile
// above its diagonal is the first band's, the half below it the second's. So every pair i < j is
// computed once, and all blocks have the same work.
//
// Patches are small, and the widest tile has 1024 threads rather than 256 with patches of 8 x 8:
// most of the code runs once a launch, when its fetching costs more than its execution.

#pragma once

#include "svgd/svgd_distances.cuh"

namespace fused_ops {

// Marks places of a tile that are no pair i < j. Its bits are above those of any distance.
constexpr float kNoPair = -1.0f;

// More would be more blocks than any GPU has multiprocessors.
constexpr int kMaxBands = 16;

template <int size>
struct SmallShape {
  static constexpr int edge = 16 * size;
  static constexpr int patch = size < 4 ? size : 4;  // side of a thread's patch
  static constexpr int side = edge / patch;          // patches side by side
  static constexpr int threads = side * side;
  static constexpr int warps = threads / 32;
};

template <int size>
struct SmallDistances {
  static constexpr int patch = SmallShape<size>::patch;
  float at[patch][patch];

  // Of the thread's patch in the tile, counted in patches. A warp has 8 rows of 4, so that few
  // warps meet the diagonal and few addresses the coordinates.
  static constexpr int warps_across = SmallShape<size>::side / 4;
  static __device__ int row() { return threadIdx.x / 32 / warps_across * 8 + threadIdx.x % 32 / 4; }
  static __device__ int column() { return threadIdx.x / 32 % warps_across * 4 + threadIdx.x % 4; }
};

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

// Coordinates of both bands, [dimension][row].
template <int size>
using SmallCoordinates = CoordinateTile<float, 16 * size>[2];

// One block of dimensions of both bands on its way from device to shared memory: all its loads are
// under way at once. A warp takes eight dimensions of four rows, which it stores to 32 banks.
template <int size>
struct SmallFetch {
  using Shape = SmallShape<size>;
  static constexpr int rows_per_thread = Shape::edge / Shape::warps;
  float values[2][rows_per_thread];

  static __device__ int dimension() { return threadIdx.x / 32 % 4 * 8 + threadIdx.x % 8; }
  static __device__ int first_row() { return threadIdx.x / 128 * 4 + threadIdx.x % 32 / 8; }

  __device__ void load(const SvgdParticles& particles, const SmallTile& tile, int d) {
    const bool inside = d + dimension() < particles.dim;
    const int64_t step = Shape::warps * particles.stride;
#pragma unroll
    for (int band = 0; band < 2; ++band) {
      const int first = tile.bands[band] * Shape::edge + first_row();
      const int left = inside ? static_cast<int>(particles.count) - first : 0;
      const auto* element =
          static_cast<const float*>(particles.data) + first * particles.stride + d + dimension();
#pragma unroll
      for (int i = 0; i < rows_per_thread; ++i) {
        values[band][i] = Shape::warps * i < left ? *element : 0.0f;
        element += step;
      }
    }
  }

  __device__ void store(SmallCoordinates<size>& coordinates) const {
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < rows_per_thread; ++i) {
        coordinates[band].at[dimension()][first_row() + Shape::warps * i] = values[band][i];
      }
    }
  }
};

// Adds the squared differences of one block of dimensions. Threads above the diagonal of a paired
// tile take both operands from the first band, threads below it from the second. Those on it have
// both bands' share of the same rows: there rows are exchanged between the operands.
template <bool diagonal_too, int size>
__device__ inline void add_differences(const SmallCoordinates<size>& coordinates, bool paired,
                                       int width, SmallDistances<size>& distances) {
  constexpr int patch = SmallShape<size>::patch;
  const int row = distances.row();
  const int column = distances.column();
  const bool diagonal = row == column;
  const float* line_i = &coordinates[paired && row > column].at[0][patch * row];
  const float* line_j = &coordinates[!paired || row >= column].at[0][patch * column];
  constexpr int stride = sizeof(coordinates[0].at[0]) / sizeof(float);
  float sums[patch][patch] = {};
  // Dimensions past the end are zero and add nothing.
  constexpr int unroll = 4;
  static_assert(kDimBlock % unroll == 0);
#pragma unroll 1
  for (int k = 0; k < width; k += unroll) {
#pragma unroll
    for (int i = 0; i < unroll; ++i) {
      float x_i[patch], x_j[patch], below_i[patch], above_j[patch];
      load_patch(line_i + i * stride, x_i);
      load_patch(line_j + i * stride, x_j);
#pragma unroll
      for (int a = 0; a < patch; ++a) {
        below_i[a] = diagonal_too && diagonal ? x_j[a] : x_i[a];
        above_j[a] = diagonal_too && diagonal ? x_i[a] : x_j[a];
      }
#pragma unroll
      for (int a = 0; a < patch; ++a) {
#pragma unroll
        for (int b = 0; b < patch; ++b) {
          const float difference = (a > b ? below_i[a] : x_i[a]) - (a < b ? above_j[b] : x_j[b]);
          sums[a][b] = fma(difference, difference, sums[a][b]);
        }
      }
    }
    line_i += unroll * stride;
    line_j += unroll * stride;
  }
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) distances.at[a][b] += sums[a][b];
  }
}

// Puts kNoPair where the tile has no pair i < j of particles.
template <int size>
__device__ inline void mark_no_pairs(int count, const SmallTile& tile,
                                     SmallDistances<size>& distances) {
  constexpr int edge = SmallShape<size>::edge;
  constexpr int patch = SmallShape<size>::patch;
  const int row = patch * distances.row();
  const int column = patch * distances.column();
  // Particles from the start of each band on.
  const int first_left = count - tile.bands[0] * edge;
  const int second_left = count - tile.bands[1] * edge;
  const bool diagonal = tile.paired && row == column;
  if (!diagonal && first_left >= edge && second_left >= edge) return;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      const int i = row + a;
      const int j = column + b;
      const bool first = tile.paired && i < j;
      const bool pair = (tile.paired && !first ? i < second_left : i < first_left) &
                        (first ? j < first_left : j < second_left) & !(diagonal && a == b);
      distances.at[a][b] = pair ? distances.at[a][b] : kNoPair;
    }
  }
}

// distances.at[a][b] is that of rows patch * row() + a and patch * column() + b of the bands, with
// the bits of tile_distances; kNoPair where that is no pair. `fetch` has loaded the first block of
// dimensions. `first_barrier` is the block's first barrier, with anything done there besides. Ends
// in a barrier.
template <int size, typename Barrier>
__device__ inline void small_distances(const SvgdParticles& particles, const SmallTile& tile,
                                       SmallFetch<size>& fetch, SmallCoordinates<size>& coordinates,
                                       SmallDistances<size>& distances, Barrier first_barrier) {
  constexpr int patch = SmallShape<size>::patch;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) distances.at[a][b] = 0;
  }
  const bool diagonal =
      __any_sync(0xffffffffu, tile.paired && distances.row() == distances.column());
  const int dim = static_cast<int>(particles.dim);
  for (int d = 0; d < dim; d += kDimBlock) {
    fetch.store(coordinates);
    if (d == 0) {
      first_barrier();
    } else {
      __syncthreads();
    }
    const int width = dim - d < kDimBlock ? dim - d : kDimBlock;
    if (d + kDimBlock < dim) fetch.load(particles, tile, d + kDimBlock);
    if (diagonal) {
      add_differences<true>(coordinates, tile.paired, width, distances);
    } else {
      add_differences<false>(coordinates, tile.paired, width, distances);
    }
    __syncthreads();
  }
  mark_no_pairs(static_cast<int>(particles.count), tile, distances);
}

}  // namespace fused_ops
