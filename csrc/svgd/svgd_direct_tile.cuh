// SPDX-License-Identifier: BSD-3-Clause
// The tiles of the direct SVGD update (svgd_direct_kernel.cuh): what shared memory holds of them,
// how it is filled, and the weights K of a tile from direct differences.
//
// A thread has a patch of kRows x kColumns pairs. Coordinates are kept with the particles side by
// side, so that a patch's operands are a few wide loads that neighbouring lanes share.

#pragma once

#include "svgd/svgd_stream.cuh"
#include "svgd/svgd_tuning.h"

namespace fused_ops {

// Kernels of their own, because differences take the registers that products need.
enum class DirectForm : int8_t { products, differences, imq };

constexpr int kDirectDepth = 64;  // dimensions in shared memory at a time
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
  float* partial;            // (splits, rows, dim); unused for one split
  int64_t tiles_per_split;
  int splits;
};

// What the kernels need of h. Its rounding errors would be those of all pairs alike, which do not
// average out: so of 1/h only the power of two goes into the repulsion, scores are multiplied by
// the rest of h, and the sums divided by it.
struct DirectScale {
  KernelScale<float> kernel;
  float mantissa;   // h over a power of two
  float repulsion;  // repulsion over that power, for imq half of it

  __device__ DirectScale(SteinKernel name, float bandwidth, float strength)
      : kernel(name, bandwidth, strength) {
    // The mantissa is below 1, for scores near the largest number.
    const int exponent = bandwidth < INFINITY ? max(ilogbf(bandwidth), -126) + 1 : 0;
    mantissa = bandwidth < INFINITY ? scalbnf(bandwidth, -exponent) : 1.0f;
    const float power = bandwidth < INFINITY ? scalbnf(strength, -exponent) : 0.0f;
    repulsion = name == SteinKernel::imq ? power / 2 : power;
  }
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
template <int rows, int stride>
__device__ inline void load_direct(const SvgdParticles& particles, int64_t first, int64_t d,
                                   float (&tile)[kDirectDepth][stride]) {
  constexpr int step = kDirectThreads / kDirectDepth;
  constexpr int batch = 16;  // loads in flight
  static_assert(rows % (step * batch) == 0);
  const int64_t left = particles.dim - d;
  const int k = threadIdx.x % kDirectDepth;
  if (k >= left) return;
  const auto* data = static_cast<const float*>(particles.data) + d + k;
  const auto last = static_cast<int>(min(particles.count - 1 - first, int64_t{rows}));
  data += first * particles.stride;
  for (int begin = threadIdx.x / kDirectDepth; begin < rows; begin += step * batch) {
    float value[batch];
#pragma unroll
    for (int index = 0; index < batch; ++index) {
      value[index] = data[min(begin + index * step, last) * particles.stride];
    }
#pragma unroll
    for (int index = 0; index < batch; ++index) {
      tile[k][begin + index * step] = value[index];
    }
  }
}

// Leaves the distances of a tile in `distances`. Ends without a barrier.
__device__ inline void direct_distances(const SvgdParticles& particles, int64_t first_i,
                                        int64_t first_j, bool first_tile, DirectShared& shared,
                                        float (&distances)[kRows][kColumns]) {
  const DirectPatch patch;
  for (int64_t d = 0; d < particles.dim; d += kDirectDepth) {
    if (first_tile || particles.dim > kDirectDepth) {
      load_direct<kDirectTile>(particles, first_i, d, shared.i);
    }
    load_direct<kDirectSource>(particles, first_j, d, shared.j);
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
                                      const DirectScale& scale, bool accurate, int64_t left,
                                      DirectShared& shared, float (&row_sums)[kRows]) {
  const DirectPatch patch;
  const auto weight_of = [&](float distance) {
    if (form == DirectForm::imq) return 1.0f / sqrtf(1.0f + distance * scale.kernel.half_inverse);
    return accurate ? accurate_weight(scale.kernel, distance)
                    : exp2_approximate(-scale.kernel.slope * distance);
  };
  float tile_sums[kRows] = {};
#pragma unroll
  for (int b = 0; b < kColumns; ++b) {
    const bool inside = patch.j + b < left;
#pragma unroll
    for (int quad = 0; quad < kRows; quad += 4) {
      Vector<float, 4> k;
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        k.value[a] = inside ? weight_of(distances[quad + a][b]) : 0.0f;
        tile_sums[quad + a] += k.value[a];
      }
      store<4>(&shared.weights[patch.j + b][patch.i + quad], k);
    }
  }
#pragma unroll
  for (int a = 0; a < kRows; ++a) row_sums[a] += tile_sums[a];
}

// V of a tile, or its scores and particles; V and scores times the mantissa of h.
template <int chunk, DirectForm form>
__device__ inline void load_values(const DirectTask& task, int64_t first, int64_t d,
                                   const DirectScale& scale, DirectShared& shared) {
  constexpr bool centred = form == DirectForm::products;
  const SvgdParticles& particles = task.update.particles;
  const auto* x = static_cast<const float*>(particles.data);
  const auto* s = static_cast<const float*>(task.update.score);
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
    float x_j[batch], score[batch];
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
      const float particle = inside ? x_j[index] : 0.0f;
      const float value = inside ? score[index] * scale.mantissa : 0.0f;
      if constexpr (!centred) shared.particles[j][k] = particle;
      shared.values[j][k] =
          centred && inside ? fmaf(-scale.repulsion, particle - mean, value) : value;
    }
  }
}

}  // namespace fused_ops
