// SPDX-License-Identifier: BSD-3-Clause
// The SVGD update of many particles from direct differences, on CUDA cores.
//
// A block owns kDirectTile particles i and `chunk` dimensions of their result and walks over tiles
// of kDirectSource particles j. It forms the squared distances of a tile, 8 x 4 to a thread, turns
// them into weights in shared memory and adds the tile's share, 8 x 4 to a thread again. Each tile
// has accumulators of its own: one sum over all j would lose digits with N.
//
// For rbf that share is sum_j K_ij V_j with V_j = s_j - c (x_j - m) where the centre m serves all
// pairs (may_centre): one instruction a pair and dimension. Elsewhere, and for imq, it is
// sum_j K_ij s_j + G_ij (x_i - x_j), three instructions. 128 x 64 tiles leave shared memory and
// registers for two blocks on a multiprocessor, whose loads and arithmetic overlap.
//
// svgd_direct          the result, or partial sums where the particles j are split
// svgd_direct_combine  adds partial sums in a fixed order

#pragma once

#include "svgd/svgd_direct_tile.cuh"

namespace fused_ops {

// What a thread adds up: particles i.. and dimensions d.. of every groups-th particle j.
template <int chunk>
struct DirectResult {
  static constexpr int threads = kDirectTile / kRows * (chunk / kColumns);
  static constexpr int groups = kDirectThreads / threads;
  static_assert(groups * threads == kDirectThreads);
  int i = threadIdx.x % threads / (chunk / kColumns) * kRows;
  int d = threadIdx.x % (chunk / kColumns) * kColumns;
  int group = threadIdx.x / threads;
};

template <int chunk>
__device__ inline void add_centred(const DirectShared& shared, float (&sums)[kRows][kColumns]) {
  const DirectResult<chunk> result;
  float tile_sums[kRows][kColumns] = {};
#pragma unroll 4
  for (int j = result.group; j < kDirectSource; j += DirectResult<chunk>::groups) {
    const auto low = load<4>(&shared.weights[j][result.i]);
    const auto high = load<4>(&shared.weights[j][result.i + 4]);
    const auto values = load<kColumns>(&shared.values[j][result.d]);
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
#pragma unroll
      for (int b = 0; b < kColumns; ++b) {
        tile_sums[a][b] =
            fmaf(a < 4 ? low.value[a % 4] : high.value[a % 4], values.value[b], tile_sums[a][b]);
      }
    }
  }
#pragma unroll
  for (int a = 0; a < kRows; ++a) {
#pragma unroll
    for (int b = 0; b < kColumns; ++b) sums[a][b] += tile_sums[a][b];
  }
}

// x_i of `rows` rows of a thread's patch, loaded for each tile: kept, it would cost a second block
// its registers.
template <int rows>
__device__ inline void load_patch(const SvgdParticles& particles, int64_t first_i, int64_t first_d,
                                  float (&x)[rows][kColumns]) {
#pragma unroll
  for (int a = 0; a < rows; ++a) {
#pragma unroll
    for (int b = 0; b < kColumns; ++b) {
      const int64_t row = first_i + a < particles.count ? first_i + a : particles.count - 1;
      const int64_t column = first_d + b < particles.dim ? first_d + b : particles.dim - 1;
      x[a][b] = static_cast<const float*>(particles.data)[row * particles.stride + column];
    }
  }
}

// Rows [part, part + 4) of the patch: all eight at once would spill.
template <int chunk, DirectForm form>
__device__ inline void add_differences(const DirectShared& shared, const SvgdParticles& particles,
                                       int64_t first_i, int64_t first_d, float repulsion, int part,
                                       float (&sums)[kRows][kColumns]) {
  const DirectResult<chunk> result;
  float x[4][kColumns];
  load_patch(particles, first_i + result.i + part, first_d + result.d, x);
  float tile_sums[4][kColumns] = {};
#pragma unroll 2
  for (int j = result.group; j < kDirectSource; j += DirectResult<chunk>::groups) {
    const auto k = load<4>(&shared.weights[j][result.i + part]);
    const auto score = load<kColumns>(&shared.values[j][result.d]);
    const auto x_j = load<kColumns>(&shared.particles[j][result.d]);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const float weight = k.value[a];
      const float g =
          form == DirectForm::imq ? weight * weight * weight * repulsion : weight * repulsion;
#pragma unroll
      for (int b = 0; b < kColumns; ++b) {
        tile_sums[a][b] = fmaf(weight, score.value[b], tile_sums[a][b]);
        tile_sums[a][b] = fmaf(g, x[a][b] - x_j.value[b], tile_sums[a][b]);
      }
    }
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
#pragma unroll
    for (int b = 0; b < kColumns; ++b) sums[part + a][b] += tile_sums[a][b];
  }
}

// Sums of K over j from the threads' parts, in order: shared.i[0][i] afterwards.
__device__ inline void reduce_row_sums(const float (&row_sums)[kRows], DirectShared& shared) {
  const DirectPatch patch;
  __syncthreads();
#pragma unroll
  for (int a = 0; a < kRows; ++a) {
    shared.weights[patch.j / kColumns][patch.i + a] = row_sums[a];
  }
  __syncthreads();
  if (threadIdx.x < kDirectTile) {
    float sum = 0;
    for (int part = 0; part < kDirectSource / kColumns; ++part) {
      sum += shared.weights[part][threadIdx.x];
    }
    shared.i[0][threadIdx.x] = sum;
  }
  __syncthreads();
}

// Adds what the groups of threads have of each result; group 0 has the sums afterwards.
template <int chunk>
__device__ inline void reduce_groups(DirectShared& shared, float (&sums)[kRows][kColumns]) {
  using Result = DirectResult<chunk>;
  static_assert(kRows * kColumns * kDirectThreads <= kDirectSource * DirectShared::stride_i);
  float* parts = &shared.weights[0][0];
#pragma unroll
  for (int a = 0; a < kRows; ++a) {
#pragma unroll
    for (int b = 0; b < kColumns; ++b) {
      parts[(a * kColumns + b) * kDirectThreads + threadIdx.x] = sums[a][b];
    }
  }
  __syncthreads();
  if (threadIdx.x >= Result::threads) return;
#pragma unroll
  for (int a = 0; a < kRows; ++a) {
#pragma unroll
    for (int b = 0; b < kColumns; ++b) {
      for (int group = 1; group < Result::groups; ++group) {
        sums[a][b] +=
            parts[(a * kColumns + b) * kDirectThreads + group * Result::threads + threadIdx.x];
      }
    }
  }
}

// Of products and differences, which are both launched for rbf without a state, one has to run.
// With a state the differences alone are launched: what needs them is what may_centre refuses.
template <DirectForm form>
__device__ inline bool direct_is_idle(const DirectTask& task) {
  if (task.state != nullptr) return task.state->direct == 0;
  if (form == DirectForm::imq) return false;
  const float max_norm = task.scale[1] / task.scale[0] / task.scale[0];
  return may_centre(max_norm, bandwidth_value(task.update)) != (form == DirectForm::products);
}

// gridDim: tiles of particles i times chunks of dimensions; splits of particles j.
template <int chunk, DirectForm form>
__global__ void __launch_bounds__(kDirectThreads, 2)
    svgd_direct(const __grid_constant__ DirectTask task) {
  extern __shared__ char memory[];
  auto& shared = *reinterpret_cast<DirectShared*>(memory);
  if (direct_is_idle<form>(task)) return;
  const SvgdUpdate& update = task.update;
  const SvgdParticles& particles = update.particles;
  const float bandwidth = bandwidth_value(update);
  const DirectScale scale(form == DirectForm::imq ? SteinKernel::imq : SteinKernel::rbf, bandwidth,
                          static_cast<float>(update.repulsion));
  const auto tiles_i = static_cast<unsigned>((update.rows + kDirectTile - 1) / kDirectTile);
  const int64_t first_i = update.first_row + int64_t{blockIdx.x % tiles_i} * kDirectTile;
  const int64_t first_d = int64_t{blockIdx.x / tiles_i} * chunk;
  const DirectResult<chunk> result;

  float sums[kRows][kColumns] = {};
  float row_sums[kRows] = {};
  const int64_t begin = blockIdx.y * task.tiles_per_split * kDirectSource;
  const int64_t limit = begin + task.tiles_per_split * kDirectSource;
  const int64_t end = limit < particles.count ? limit : particles.count;
  for (int64_t first_j = begin; first_j < end; first_j += kDirectSource) {
    float distances[kRows][kColumns];
    direct_distances(particles, first_i, first_j, first_j == begin, shared, distances);
    // Where differences are asked for, sums of one sign show errors that all weights share; around
    // the mean others are larger.
    const bool accurate = form == DirectForm::differences && update.precision == Precision::highest;
    direct_weights<form>(distances, scale, accurate, particles.count - first_j, shared, row_sums);
    __syncthreads();  // the coordinates give their place to the values
    load_values<chunk, form>(task, first_j, first_d, scale, shared);
    __syncthreads();
    if constexpr (form == DirectForm::products) {
      add_centred<chunk>(shared, sums);
    } else {
#pragma unroll
      for (int part = 0; part < kRows; part += 4) {
        add_differences<chunk, form>(shared, particles, first_i, first_d, scale.repulsion, part,
                                     sums);
      }
    }
    __syncthreads();
  }

  if constexpr (form == DirectForm::products) reduce_row_sums(row_sums, shared);
  if constexpr (DirectResult<chunk>::groups > 1) reduce_groups<chunk>(shared, sums);
  if (result.group != 0) return;
  float x[kRows][kColumns];
  load_patch(particles, first_i + result.i, first_d + result.d, x);
  const int64_t end_i = update.first_row + update.rows;
#pragma unroll
  for (int a = 0; a < kRows; ++a) {
#pragma unroll
    for (int b = 0; b < kColumns; ++b) {
      const int64_t row = first_i + result.i + a;
      const int64_t column = first_d + result.d + b;
      if (row >= end_i || column >= particles.dim) continue;
      float sum = sums[a][b];
      if constexpr (form == DirectForm::products) {
        sum += scale.repulsion * (x[a][b] - task.mean[column]) * shared.i[0][result.i + a];
      }
      sum /= scale.mantissa;
      if (task.splits == 1) {
        store_result(update, row, column, sum);
      } else {
        const int64_t part = blockIdx.y * update.rows + row - update.first_row;
        task.partial[part * particles.dim + column] = sum;
      }
    }
  }
}

static __global__ void __launch_bounds__(kDirectThreads)
    svgd_direct_combine(const __grid_constant__ DirectTask task) {
  if (task.state != nullptr && task.state->direct == 0) return;
  const int64_t dim = task.update.particles.dim;
  const int64_t size = task.update.rows * dim;
  const int64_t stride = int64_t{gridDim.x} * kDirectThreads;
  for (int64_t index = int64_t{blockIdx.x} * kDirectThreads + threadIdx.x; index < size;
       index += stride) {
    float sum = 0;
    for (int split = 0; split < task.splits; ++split) sum += task.partial[split * size + index];
    store_result(task.update, task.update.first_row + index / dim, index % dim, sum);
  }
}

}  // namespace fused_ops
