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

#include "svgd/svgd_stream.cuh"

namespace fused_ops {

// Kernels of their own, because differences take the registers that products need.
enum class DirectForm : int8_t { products, differences, imq };

constexpr int kDirectTile = 128;   // particles i
constexpr int kDirectSource = 64;  // particles j
constexpr int kDirectDepth = 64;   // dimensions in shared memory at a time
constexpr int kDirectThreads = 256;
constexpr int kRows = 8;     // particles i of a thread's patch
constexpr int kColumns = 4;  // particles j, then dimensions, of it
constexpr int kMaxDirectChunk = 64;
static_assert(kDirectTile / kRows * (kDirectSource / kColumns) == kDirectThreads);

struct DirectTask {
  SvgdUpdate update;
  const float* mean;         // (dim)
  const float* scale;        // of the split particles: the scale itself, then the largest norm
  const StreamState* state;  // if not null, the kernels do nothing unless it asks for them
  float* partial;            // (splits, count, dim); unused for one split
  int64_t tiles_per_split;
  int splits;
};

struct alignas(16) DirectShared {
  static constexpr int stride_i = kDirectTile + 4;  // rows on different banks, 16-byte aligned
  static constexpr int stride_j = kDirectSource + 4;
  float weights[kDirectSource][stride_i];  // K; distances while they are summed
  float i[kDirectDepth][stride_i];
  union {
    float j[kDirectDepth][stride_j];
    float values[kDirectSource][kMaxDirectChunk];  // V, or scores
  };
  float particles[kDirectSource][kMaxDirectChunk];
};
static_assert(2 * (sizeof(DirectShared) + 1024) <= 227 * 1024);

// The patch of distances, then weights, of a thread: neighbouring lanes share their loads.
struct DirectPatch {
  int i = (threadIdx.x / 64 * 4 + threadIdx.x % 32 / 8) * kRows;
  int j = (threadIdx.x / 32 % 2 * 8 + threadIdx.x % 8) * kColumns;
};

// Coordinates [d, d + kDirectDepth) of particles [first, first + rows). Past the last particle it
// repeats that one, which needs no branch between the loads: nothing uses those rows.
template <typename scalar, int rows, int stride>
__device__ inline void load_direct(const SvgdParticles& particles, int64_t first, int64_t d,
                                   float (&tile)[kDirectDepth][stride]) {
  constexpr int step = kDirectThreads / kDirectDepth;
  constexpr int batch = 16;  // loads in flight
  static_assert(rows % (step * batch) == 0);
  const int64_t left = particles.dim - d;
  const int k = threadIdx.x % kDirectDepth;
  if (k >= left) return;
  const auto* data = static_cast<const scalar*>(particles.data) + d + k;
  const auto last = static_cast<int>(min(particles.count - 1 - first, int64_t{rows}));
  data += first * particles.stride;
  for (int begin = threadIdx.x / kDirectDepth; begin < rows; begin += step * batch) {
    scalar value[batch];
#pragma unroll
    for (int index = 0; index < batch; ++index) {
      value[index] = data[min(begin + index * step, last) * particles.stride];
    }
#pragma unroll
    for (int index = 0; index < batch; ++index) {
      tile[k][begin + index * step] = to_accumulate(value[index]);
    }
  }
}

// Leaves the distances of a tile in `distances`. Ends without a barrier.
template <typename scalar>
__device__ inline void direct_distances(const SvgdParticles& particles, int64_t first_i,
                                        int64_t first_j, bool first_tile, DirectShared& shared,
                                        float (&distances)[kRows][kColumns]) {
  const DirectPatch patch;
  for (int64_t d = 0; d < particles.dim; d += kDirectDepth) {
    if (first_tile || particles.dim > kDirectDepth) {
      load_direct<scalar, kDirectTile>(particles, first_i, d, shared.i);
    }
    load_direct<scalar, kDirectSource>(particles, first_j, d, shared.j);
    __syncthreads();
    const int64_t left = particles.dim - d;
    const int depth = left < kDirectDepth ? static_cast<int>(left) : kDirectDepth;
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
#pragma unroll
      for (int b = 0; b < kColumns; ++b) distances[a][b] = 0;
    }
#pragma unroll 4
    for (int k = 0; k < depth; ++k) {
      const auto low = load<4>(&shared.i[k][patch.i]);
      const auto high = load<4>(&shared.i[k][patch.i + 4]);
      const auto x_j = load<kColumns>(&shared.j[k][patch.j]);
#pragma unroll
      for (int a = 0; a < kRows; ++a) {
#pragma unroll
        for (int b = 0; b < kColumns; ++b) {
          const float difference = (a < 4 ? low.value[a % 4] : high.value[a % 4]) - x_j.value[b];
          distances[a][b] = fmaf(difference, difference, distances[a][b]);
        }
      }
    }
    if (particles.dim > kDirectDepth) {  // sums of blocks are added in shared memory
#pragma unroll
      for (int b = 0; b < kColumns; ++b) {
#pragma unroll
        for (int a = 0; a < kRows; ++a) {
          float& sum = shared.weights[patch.j + b][patch.i + a];
          if (d > 0) distances[a][b] += sum;
          sum = distances[a][b];
        }
      }
      __syncthreads();
    }
  }
}

// Turns distances into K in shared memory and adds their sums over j to `row_sums`.
template <DirectForm form>
__device__ inline void direct_weights(const float (&distances)[kRows][kColumns],
                                      const KernelScale<float>& scale, int64_t left,
                                      DirectShared& shared, float (&row_sums)[kRows]) {
  const DirectPatch patch;
  constexpr float log2_e = 1.44269504f;
  const float slope = -log2_e * scale.half_inverse;
  float tile_sums[kRows] = {};
#pragma unroll
  for (int b = 0; b < kColumns; ++b) {
    const bool inside = patch.j + b < left;
#pragma unroll
    for (int quad = 0; quad < kRows; quad += 4) {
      Vector<float, 4> k;
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float distance = distances[quad + a][b];
        const float weight = form == DirectForm::imq
                                 ? 1.0f / sqrtf(1.0f + distance * scale.half_inverse)
                                 : exp2_approximate(distance * slope);
        k.value[a] = inside ? weight : 0.0f;
        tile_sums[quad + a] += k.value[a];
      }
      store<4>(&shared.weights[patch.j + b][patch.i + quad], k);
    }
  }
#pragma unroll
  for (int a = 0; a < kRows; ++a) row_sums[a] += tile_sums[a];
}

// V of a tile, or its scores and particles.
template <typename scalar, int chunk, DirectForm form>
__device__ inline void load_values(const DirectTask& task, int64_t first, int64_t d,
                                   float repulsion, DirectShared& shared) {
  constexpr bool centred = form == DirectForm::products;
  const SvgdParticles& particles = task.update.particles;
  const auto* x = static_cast<const scalar*>(particles.data);
  const auto* s = static_cast<const scalar*>(task.update.score);
  constexpr int step = kDirectThreads / chunk;
  constexpr int each = kDirectSource / step > 0 ? kDirectSource / step : 1;
  constexpr int batch = each < 8 ? each : 8;  // rows in flight
  const int k = threadIdx.x % chunk;
  const auto last = static_cast<int>(min(particles.count - 1 - first, int64_t{kDirectSource}));
  const bool column_inside = d + k < particles.dim;
  const int64_t column = column_inside ? d + k : particles.dim - 1;
  x += first * particles.stride + column;
  s += first * task.update.score_stride + column;
  const float mean = centred ? task.mean[column] : 0.0f;
  for (int begin = threadIdx.x / chunk; begin < kDirectSource; begin += step * batch) {
    scalar x_j[batch], score[batch];
#pragma unroll
    for (int index = 0; index < batch; ++index) {
      const int row = min(begin + index * step, last);
      x_j[index] = x[row * particles.stride];
      score[index] = s[row * task.update.score_stride];
    }
#pragma unroll
    for (int index = 0; index < batch; ++index) {
      // Zero past the end, where K is zero: with infinity in a repeated row it would be NaN.
      const int j = begin + index * step;
      const bool inside = j <= last && column_inside;
      const float particle = inside ? to_accumulate(x_j[index]) : 0.0f;
      const float value = inside ? to_accumulate(score[index]) : 0.0f;
      if constexpr (!centred) shared.particles[j][k] = particle;
      shared.values[j][k] = centred && inside ? fmaf(-repulsion, particle - mean, value) : value;
    }
  }
}

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
template <typename scalar, int rows>
__device__ inline void load_patch(const SvgdParticles& particles, int64_t first_i, int64_t first_d,
                                  float (&x)[rows][kColumns]) {
#pragma unroll
  for (int a = 0; a < rows; ++a) {
#pragma unroll
    for (int b = 0; b < kColumns; ++b) {
      const int64_t row = first_i + a < particles.count ? first_i + a : particles.count - 1;
      const int64_t column = first_d + b < particles.dim ? first_d + b : particles.dim - 1;
      x[a][b] = to_accumulate(
          static_cast<const scalar*>(particles.data)[row * particles.stride + column]);
    }
  }
}

// Rows [part, part + 4) of the patch: all eight at once would spill.
template <typename scalar, int chunk, DirectForm form>
__device__ inline void add_differences(const DirectShared& shared, const SvgdParticles& particles,
                                       int64_t first_i, int64_t first_d, float repulsion, int part,
                                       float (&sums)[kRows][kColumns]) {
  const DirectResult<chunk> result;
  float x[4][kColumns];
  load_patch<scalar>(particles, first_i + result.i + part, first_d + result.d, x);
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
template <typename scalar, int chunk, DirectForm form>
__global__ void __launch_bounds__(kDirectThreads, 2)
    svgd_direct(const __grid_constant__ DirectTask task) {
  extern __shared__ char memory[];
  auto& shared = *reinterpret_cast<DirectShared*>(memory);
  if (direct_is_idle<form>(task)) return;
  const SvgdUpdate& update = task.update;
  const SvgdParticles& particles = update.particles;
  const float bandwidth = bandwidth_value(update);
  const KernelScale<float> scale(form == DirectForm::imq ? SteinKernel::imq : SteinKernel::rbf,
                                 bandwidth, static_cast<float>(update.repulsion));
  const auto tiles_i = static_cast<unsigned>((particles.count + kDirectTile - 1) / kDirectTile);
  const int64_t first_i = int64_t{blockIdx.x % tiles_i} * kDirectTile;
  const int64_t first_d = int64_t{blockIdx.x / tiles_i} * chunk;
  const DirectResult<chunk> result;

  float sums[kRows][kColumns] = {};
  float row_sums[kRows] = {};
  const int64_t begin = blockIdx.y * task.tiles_per_split * kDirectSource;
  const int64_t limit = begin + task.tiles_per_split * kDirectSource;
  const int64_t end = limit < particles.count ? limit : particles.count;
  for (int64_t first_j = begin; first_j < end; first_j += kDirectSource) {
    float distances[kRows][kColumns];
    direct_distances<scalar>(particles, first_i, first_j, first_j == begin, shared, distances);
    direct_weights<form>(distances, scale, particles.count - first_j, shared, row_sums);
    __syncthreads();  // the coordinates give their place to the values
    load_values<scalar, chunk, form>(task, first_j, first_d, scale.repulsion, shared);
    __syncthreads();
    if constexpr (form == DirectForm::products) {
      add_centred<chunk>(shared, sums);
    } else {
#pragma unroll
      for (int part = 0; part < kRows; part += 4) {
        add_differences<scalar, chunk, form>(shared, particles, first_i, first_d, scale.repulsion,
                                             part, sums);
      }
    }
    __syncthreads();
  }

  if constexpr (form == DirectForm::products) reduce_row_sums(row_sums, shared);
  if constexpr (DirectResult<chunk>::groups > 1) reduce_groups<chunk>(shared, sums);
  if (result.group != 0) return;
  float x[kRows][kColumns];
  load_patch<scalar>(particles, first_i + result.i, first_d + result.d, x);
#pragma unroll
  for (int a = 0; a < kRows; ++a) {
#pragma unroll
    for (int b = 0; b < kColumns; ++b) {
      const int64_t row = first_i + result.i + a;
      const int64_t column = first_d + result.d + b;
      if (row >= particles.count || column >= particles.dim) continue;
      float sum = sums[a][b];
      if constexpr (form == DirectForm::products) {
        sum += scale.repulsion * (x[a][b] - task.mean[column]) * shared.i[0][result.i + a];
      }
      if (task.splits == 1) {
        store_result<scalar>(update, row, column, sum);
      } else {
        task.partial[(blockIdx.y * particles.count + row) * particles.dim + column] = sum;
      }
    }
  }
}

template <typename scalar>
__global__ void __launch_bounds__(kDirectThreads)
    svgd_direct_combine(const __grid_constant__ DirectTask task) {
  if (task.state != nullptr && task.state->direct == 0) return;
  const int64_t dim = task.update.particles.dim;
  const int64_t size = task.update.particles.count * dim;
  const int64_t stride = int64_t{gridDim.x} * kDirectThreads;
  for (int64_t index = int64_t{blockIdx.x} * kDirectThreads + threadIdx.x; index < size;
       index += stride) {
    float sum = 0;
    for (int split = 0; split < task.splits; ++split) sum += task.partial[split * size + index];
    store_result<scalar>(task.update, index / dim, index % dim, sum);
  }
}

}  // namespace fused_ops
