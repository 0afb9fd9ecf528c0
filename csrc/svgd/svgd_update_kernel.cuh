// SPDX-License-Identifier: BSD-3-Clause
// The SVGD update: weights of a tile of pairs from their distances, applied at once.
//
// A block owns kUpdateTile particles i and `chunk` of their dimensions, and walks over tiles of
// particles j. For each tile it computes the distances, turns them into weights in shared memory
// and adds K_ij * score_j + G_ij * (x_i - x_j) in registers, 4 x 4 to a thread. The difference is
// formed per pair, because splitting it into x_i * sum(G) - sum(G x_j) cancels away from the
// origin. Each tile has accumulators of its own: one sum over all j would lose digits with N.
//
// svgd_update          phi or the step, or partial sums where the particles j are split
// svgd_update_combine  adds partial sums in a fixed order

#pragma once

#include "svgd/svgd_device.cuh"
#include "svgd/svgd_distances.cuh"
#include "svgd/svgd_formula.h"

namespace fused_ops {

constexpr int kUpdateTile = 64;  // particles i
constexpr int kPatch = 4;

// Particles j of a tile (16 times the columns of a thread's patch of distances), and the most
// dimensions of the result that a block can own. float64 stops where shared memory does.
template <typename T>
constexpr int kSourcePatch = sizeof(T) == 8 ? 1 : 2;
template <typename T>
constexpr int kSourceTile = 16 * kSourcePatch<T>;
template <typename T>
constexpr int kMaxChunk = sizeof(T) == 8 ? 16 : 64;

struct UpdateTask {
  SvgdUpdate update;
  const void* stored;       // the distances, (count, count), or null: then they are computed
  void* partial;            // (splits, rows, dim) in the accumulation type; unused for one split
  int64_t tiles_per_split;  // tiles of particles j that one block walks over
};

template <typename T>
struct alignas(kPatch * sizeof(T)) Weights {
  T kernel[kSourceTile<T>][kUpdateTile + kPatch];     // K_ij
  T repulsion[kSourceTile<T>][kUpdateTile + kPatch];  // G_ij: that times (x_i - x_j) repels
};

template <typename T, int chunk>
union UpdateShared {
  struct {
    Weights<T> weights;
    union {
      struct {
        CoordinateTile<T, kUpdateTile> i;
        CoordinateTile<T, kSourceTile<T>> j;
      } coordinates;
      struct alignas(kPatch * sizeof(T)) {
        T score[kSourceTile<T>][chunk];
        T particle[kSourceTile<T>][chunk];
      } source;
    };
  };
  T sums[kTileThreads][kPatch * kPatch];  // of the groups that share a result, at the end
};
static_assert(sizeof(UpdateShared<double, kMaxChunk<double>>) <= 48 * 1024);
static_assert(sizeof(UpdateShared<float, kMaxChunk<float>>) <= 48 * 1024);

template <SteinKernel kernel, typename T>
__device__ inline void store_weights(const T (&distances)[4][kSourcePatch<T>],
                                     const KernelScale<T>& scale, int64_t left,
                                     Weights<T>& weights) {
  const int i = 4 * (threadIdx.x / 16);
  const int j = kSourcePatch<T> * (threadIdx.x % 16);
#pragma unroll
  for (int b = 0; b < kSourcePatch<T>; ++b) {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const T u = distances[a][b] * scale.half_inverse;
      T k, g;
      if constexpr (kernel == SteinKernel::rbf) {
        k = exp(-u);
        g = k * scale.repulsion;
      } else {
        k = T(1) / sqrt(T(1) + u);
        g = k * k * k * scale.repulsion;
      }
      const bool inside = j + b < left;
      weights.kernel[j + b][i + a] = inside ? k : T(0);
      weights.repulsion[j + b][i + a] = inside ? g : T(0);
    }
  }
}

template <int chunk, typename T>
__device__ inline void load_source(const SvgdUpdate& update, int64_t first, int64_t d,
                                   T (&score)[kSourceTile<T>][chunk],
                                   T (&particle)[kSourceTile<T>][chunk]) {
  const SvgdParticles& particles = update.particles;
  const auto* x = static_cast<const T*>(particles.data);
  const auto* s = static_cast<const T*>(update.score);
#pragma unroll
  for (int index = threadIdx.x; index < kSourceTile<T> * chunk; index += kTileThreads) {
    const int64_t row = first + index / chunk;
    const int64_t k = d + index % chunk;
    const bool inside = row < particles.count && k < particles.dim;
    particle[index / chunk][index % chunk] = inside ? x[row * particles.stride + k] : T(0);
    score[index / chunk][index % chunk] = inside ? s[row * update.score_stride + k] : T(0);
  }
}

template <typename T>
__device__ inline void store_update(const SvgdUpdate& update, int64_t i, int64_t d, T sum) {
  T value = sum / static_cast<T>(update.particles.count);
  if (update.step) {
    const auto* x = static_cast<const T*>(update.particles.data);
    value = x[i * update.particles.stride + d] + static_cast<T>(update.step_size) * value;
  }
  static_cast<T*>(update.result)[(i - update.first_row) * update.particles.dim + d] = value;
}

// gridDim: tiles of particles i times chunks of dimensions; splits of particles j.
template <typename T, int chunk, SteinKernel kernel>
__global__ void __launch_bounds__(kTileThreads)
    svgd_update(const __grid_constant__ UpdateTask task) {
  constexpr int group_size = kUpdateTile / kPatch * (chunk / kPatch);
  constexpr int groups = kTileThreads / group_size;  // each takes every groups-th particle j
  static_assert(groups * group_size == kTileThreads);
  __shared__ UpdateShared<T, chunk> shared;
  Weights<T>& weights = shared.weights;
  const SvgdUpdate& update = task.update;
  const SvgdParticles& particles = update.particles;
  const KernelScale<T> scale(kernel, bandwidth_value<T>(update), static_cast<T>(update.repulsion));
  const auto tiles_i = static_cast<unsigned>((update.rows + kUpdateTile - 1) / kUpdateTile);
  const int64_t first_i = update.first_row + int64_t{blockIdx.x % tiles_i} * kUpdateTile;
  const int64_t first_d = int64_t{blockIdx.x / tiles_i} * chunk;
  const int group = threadIdx.x / group_size;
  const int i = threadIdx.x % group_size / (chunk / kPatch) * kPatch;  // of this thread's patch
  const int d = threadIdx.x % (chunk / kPatch) * kPatch;

  T x[kPatch][kPatch];
#pragma unroll
  for (int a = 0; a < kPatch; ++a) {
#pragma unroll
    for (int b = 0; b < kPatch; ++b) {
      const int64_t row = first_i + i + a;
      const int64_t column = first_d + d + b;
      const bool inside = row < particles.count && column < particles.dim;
      x[a][b] =
          inside ? static_cast<const T*>(particles.data)[row * particles.stride + column] : T(0);
    }
  }

  T sums[kPatch][kPatch] = {};
  const int64_t begin = blockIdx.y * task.tiles_per_split * kSourceTile<T>;
  const int64_t limit = begin + task.tiles_per_split * kSourceTile<T>;
  const int64_t end = limit < particles.count ? limit : particles.count;
  for (int64_t first_j = begin; first_j < end; first_j += kSourceTile<T>) {
    T distances[4][kSourcePatch<T>];
    if (task.stored != nullptr) {
      stored_distances(static_cast<const T*>(task.stored), particles.count, first_i, first_j,
                       distances);
    } else {
      tile_distances(particles, first_i, first_j, shared.coordinates.i, shared.coordinates.j,
                     distances);
    }
    store_weights<kernel>(distances, scale, particles.count - first_j, weights);
    load_source<chunk>(update, first_j, first_d, shared.source.score, shared.source.particle);
    __syncthreads();
    T tile_sums[kPatch][kPatch] = {};
#pragma unroll 4
    for (int j = group; j < kSourceTile<T>; j += groups) {
      const auto k = load<kPatch>(&weights.kernel[j][i]);
      const auto g = load<kPatch>(&weights.repulsion[j][i]);
      const auto score = load<kPatch>(&shared.source.score[j][d]);
      const auto x_j = load<kPatch>(&shared.source.particle[j][d]);
#pragma unroll
      for (int a = 0; a < kPatch; ++a) {
#pragma unroll
        for (int b = 0; b < kPatch; ++b) {
          tile_sums[a][b] = fma(k.value[a], score.value[b], tile_sums[a][b]);
          tile_sums[a][b] = fma(g.value[a], x[a][b] - x_j.value[b], tile_sums[a][b]);
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kPatch; ++a) {
#pragma unroll
      for (int b = 0; b < kPatch; ++b) sums[a][b] += tile_sums[a][b];
    }
    __syncthreads();
  }

  if constexpr (groups > 1) {
#pragma unroll
    for (int a = 0; a < kPatch; ++a) {
#pragma unroll
      for (int b = 0; b < kPatch; ++b) shared.sums[threadIdx.x][a * kPatch + b] = sums[a][b];
    }
    __syncthreads();
    if (group != 0) return;
#pragma unroll
    for (int a = 0; a < kPatch; ++a) {
#pragma unroll
      for (int b = 0; b < kPatch; ++b) {
        for (int other = 1; other < groups; ++other) {
          sums[a][b] += shared.sums[other * group_size + threadIdx.x][a * kPatch + b];
        }
      }
    }
  }
  const int64_t end_i = update.first_row + update.rows;
  for (int a = 0; a < kPatch && first_i + i + a < end_i; ++a) {
    for (int b = 0; b < kPatch && first_d + d + b < particles.dim; ++b) {
      const int64_t row = first_i + i + a;
      const int64_t column = first_d + d + b;
      if (gridDim.y == 1) {
        store_update(update, row, column, sums[a][b]);
      } else {
        const int64_t part = blockIdx.y * update.rows + row - update.first_row;
        static_cast<T*>(task.partial)[part * particles.dim + column] = sums[a][b];
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    svgd_update_combine(const __grid_constant__ UpdateTask task, int splits) {
  const int64_t dim = task.update.particles.dim;
  const int64_t size = task.update.rows * dim;
  const int64_t stride = int64_t{gridDim.x} * kTileThreads;
  for (int64_t index = int64_t{blockIdx.x} * kTileThreads + threadIdx.x; index < size;
       index += stride) {
    T sum = 0;
    for (int split = 0; split < splits; ++split) {
      sum += static_cast<const T*>(task.partial)[split * size + index];
    }
    store_update(task.update, task.update.first_row + index / dim, index % dim, sum);
  }
}

}  // namespace fused_ops
