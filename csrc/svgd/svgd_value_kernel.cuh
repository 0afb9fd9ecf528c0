// SPDX-License-Identifier: BSD-3-Clause
// Before and after the streaming kernel: its slots of values, phi from its sums.
//
// With c = repulsion / h and the mean m, phi_i = 1/N [ s_i + sum_{j != i} K_ij V_j
// + c (x_i - m) sum_{j != i} K_ij ] with the values V_j = s_j - c (x_j - m). Particle i itself is
// left out of the sums because its share is exactly s_i, which V_i would bury where h is small.
// c has no bound that the halves of V could hold, so V is scaled by its maximum.
//
// svgd_stream_maximum  the maximum of |V|, one number a block
// svgd_stream_tiles    slots of values, and what the other kernels need to know
// svgd_stream_result   phi or the step, and whether the direct kernel has to replace it

#pragma once

#include "common/device/wgmma.cuh"
#include "svgd/svgd_stream.cuh"

namespace fused_ops {

__device__ inline float repulsion_over_bandwidth(const SvgdUpdate& update) {
  return KernelScale<float>(SteinKernel::rbf, bandwidth_value(update),
                            static_cast<float>(update.repulsion))
      .repulsion;
}

__device__ inline float value_at(const StreamTask& task, float repulsion, int64_t row, int column) {
  const SvgdUpdate& update = task.update;
  const float x =
      static_cast<const float*>(update.particles.data)[row * update.particles.stride + column];
  const float score = static_cast<const float*>(update.score)[row * update.score_stride + column];
  return fmaf(-repulsion, x - task.split.mean[column], score);
}

static __global__ void __launch_bounds__(kStreamThreads)
    svgd_stream_maximum(const __grid_constant__ StreamTask task) {
  __shared__ Maximum shared[kStreamThreads / kWarpSize];
  const SvgdParticles& particles = task.update.particles;
  const float repulsion = repulsion_over_bandwidth(task.update);
  const int dim = static_cast<int>(particles.dim);
  int lanes = 1;  // threads that share a row
  while (lanes < dim && lanes < kStreamThreads) lanes *= 2;
  const int rows = kStreamThreads / lanes;
  Maximum maximum;
#pragma unroll 4
  for (int64_t row = int64_t{blockIdx.x} * rows + threadIdx.x / lanes; row < particles.count;
       row += int64_t{gridDim.x} * rows) {
    for (int column = threadIdx.x % lanes; column < dim; column += lanes) {
      const float value = value_at(task, repulsion, row, column);
      maximum.merge({__float_as_uint(fabsf(value))});
    }
  }
  maximum = reduce_group(maximum, kStreamThreads, shared);
  if (threadIdx.x == 0) task.maxima[blockIdx.x] = __uint_as_float(maximum.bits);
}

// A thread's part of the state; all blocks form the same one.
__device__ inline StreamState stream_state(const StreamTask& task, Maximum* shared) {
  Maximum maximum;
  for (int block = threadIdx.x; block < task.maximum_blocks; block += kStreamThreads) {
    maximum.merge({__float_as_uint(task.maxima[block])});
  }
  maximum = reduce_group(maximum, kStreamThreads, shared);
  if (threadIdx.x == 0) shared[0] = maximum;
  __syncthreads();
  const float most = __uint_as_float(shared[0].bits);
  StreamState state;
  int exponent = 0;
  if (most > 0 && isfinite(most)) frexpf(most, &exponent);
  exponent = kValueExponent + 1 - exponent;
  exponent = exponent > 100 ? 100 : exponent;
  state.value_scale = ldexpf(1.0f, exponent);
  constexpr double log2_e = 1.44269504088896340736;
  const double scale = task.split.scale[0];
  // Rounded once, as KernelScale has it.
  state.slope = static_cast<float>(log2_e / (bandwidth_value(task.update) * scale * scale));
  state.direct = !(isfinite(most) && isfinite(task.split.scale[1] * state.slope));
  return state;
}

// Values of one slot: a thread forms those of eight particles, which lie together, from loads that
// neighbours make together. Shared memory turns its stores into whole lines.
template <int width>
__device__ inline void fill_values(const StreamTask& task, const StreamState& state, int tile,
                                   int chunk, char* image) {
  constexpr int row_bytes = kSplitTile * sizeof(__half);
  constexpr int together = 8;
  const int chunks = task.split.padded_dim / width;
  const SvgdParticles& particles = task.update.particles;
  const float repulsion = repulsion_over_bandwidth(task.update);
  for (int index = threadIdx.x; index < kSplitTile / together * width; index += kStreamThreads) {
    const int first = index / width * together;
    const int column = index % width;
    Vector<__half, together> high, low;
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const int64_t row = int64_t{tile} * kSplitTile + first + j;
      const int d = chunk * width + column;
      const float value = row < particles.count && d < particles.dim
                              ? value_at(task, repulsion, row, d) * state.value_scale
                              : 0.0f;
      high.value[j] = __float2half_rn(value);
      low.value[j] = __float2half_rn(value - __half2float(high.value[j]));
    }
    const int offset = swizzled(column * row_bytes + first * 2, row_bytes);
    *reinterpret_cast<Vector<__half, together>*>(image + offset) = high;
    *reinterpret_cast<Vector<__half, together>*>(image + width * row_bytes + offset) = low;
  }
  __syncthreads();
  auto* slot = reinterpret_cast<uint4*>(task.values +
                                        (int64_t{tile} * chunks + chunk) * split_slot_size(width));
  for (int index = threadIdx.x; index < split_slot_size(width) / 8; index += kStreamThreads) {
    slot[index] = reinterpret_cast<const uint4*>(image)[index];
  }
}

// gridDim: tiles, chunks.
template <int width>
__global__ void __launch_bounds__(kStreamThreads)
    svgd_stream_tiles(const __grid_constant__ StreamTask task) {
  __shared__ Maximum maxima[kStreamThreads / kWarpSize];
  __shared__ uint4 image[split_slot_size(width) / 8];
  const auto tile = static_cast<int>(blockIdx.x);
  const auto chunk = static_cast<int>(blockIdx.y);
  const StreamState state = stream_state(task, maxima);
  if (tile == 0 && chunk == 0 && threadIdx.x == 0) *task.state = state;
  if (state.direct != 0) return;
  fill_values<width>(task, state, tile, chunk, reinterpret_cast<char*>(image));
  if (chunk == 0 && threadIdx.x < kSplitTile) {
    const int64_t row = int64_t{tile} * kSplitTile + threadIdx.x;
    task.bias[row] =
        row < task.update.particles.count ? -0.5f * state.slope * task.split.norms[row] : -INFINITY;
  }
}

// A warp to a particle.
static __global__ void __launch_bounds__(kStreamThreads)
    svgd_stream_result(const __grid_constant__ StreamTask task) {
  const StreamState& state = *task.state;
  const SvgdUpdate& update = task.update;
  const SvgdParticles& particles = update.particles;
  const int64_t index =
      int64_t{blockIdx.x} * (kStreamThreads / kWarpSize) + threadIdx.x / kWarpSize;
  const int64_t row = update.first_row + index;
  const int lane = threadIdx.x % kWarpSize;
  // Other blocks of this launch may set the flag; either way the direct kernel writes all.
  if (index >= update.rows || state.direct != 0) return;
  const int64_t own = row - int64_t{task.first_tile} * kSplitTile;
  float weights = 0;
  for (int split = 0; split < task.splits; ++split) {
    weights += task.weights[split * own_rows(task) + own];
  }
  weights *= kInverseWeightScale;
  constexpr float ln_2 = 0.693147181f;
  if (lane == 0 && needs_direct(-ln_2 * task.bias[row], weights)) atomicOr(&task.state->direct, 1);
  const float repulsion = repulsion_over_bandwidth(update);
  const float unscale = kInverseWeightScale / state.value_scale;
  for (int column = lane; column < particles.dim; column += kWarpSize) {
    float sum = 0;
    for (int split = 0; split < task.splits; ++split) {
      sum += task.sums[(split * own_rows(task) + own) * task.split.padded_dim + column];
    }
    const float x = static_cast<const float*>(particles.data)[row * particles.stride + column];
    const float score = static_cast<const float*>(update.score)[row * update.score_stride + column];
    const float repelled = repulsion * (x - task.split.mean[column]) * weights;
    store_result(update, row, column, score + fmaf(sum, unscale, repelled));
  }
}

}  // namespace fused_ops
