// SPDX-License-Identifier: BSD-3-Clause
// Splits particles into halves around their mean (svgd_split.h).
//
// svgd_split_sums     column sums of a share of the rows, in float64
// svgd_split_mean     their mean, in a fixed order
// svgd_split_maximum  the largest |x - mean|
// svgd_split_rows     halves and norms
//
// Maxima are taken by integer atomics on the bits of non-negative floats, whose order does not
// matter; NaN is above all, so that it is not lost.

#pragma once

#include "common/device/reduce.cuh"
#include "common/device/vector.cuh"
#include "svgd/svgd_split.h"

namespace fused_ops {

constexpr int kSplitThreads = 256;
constexpr int kSplitColumns = 64;  // of a block; each has kSplitThreads / kSplitColumns threads
constexpr int kSplitRowBlocks = 128;
constexpr int kLargestExponent = 8;

struct SplitTask {
  SvgdParticles particles;
  SplitParticles split;
  double* sums;       // (kSplitRowBlocks, dim)
  unsigned* maximum;  // bits of the largest |x - mean|
};

// Calls `visit(x, column)` for the elements of this thread's column in the block's share of rows.
template <typename scalar, typename Visit>
__device__ inline void for_each_in_column(const SvgdParticles& particles, Visit visit) {
  const auto* data = static_cast<const scalar*>(particles.data);
  const int64_t column = int64_t{blockIdx.x} * kSplitColumns + threadIdx.x % kSplitColumns;
  if (column >= particles.dim) return;
  constexpr int lanes = kSplitThreads / kSplitColumns;
  for (int64_t row = int64_t{blockIdx.y} * lanes + threadIdx.x / kSplitColumns;
       row < particles.count; row += int64_t{gridDim.y} * lanes) {
    visit(to_accumulate(data[row * particles.stride + column]), column);
  }
}

template <typename scalar>
__global__ void __launch_bounds__(kSplitThreads)
    svgd_split_sums(const __grid_constant__ SplitTask task) {
  __shared__ double shared[kSplitThreads];
  double sum = 0;
  for_each_in_column<scalar>(task.particles, [&](float x, int64_t) { sum += x; });
  shared[threadIdx.x] = sum;
  __syncthreads();
  const int64_t column = int64_t{blockIdx.x} * kSplitColumns + threadIdx.x;
  if (threadIdx.x >= kSplitColumns || column >= task.particles.dim) return;
  for (int other = kSplitColumns; other < kSplitThreads; other += kSplitColumns) {
    sum += shared[threadIdx.x + other];
  }
  task.sums[blockIdx.y * task.particles.dim + column] = sum;
}

static __global__ void __launch_bounds__(kSplitThreads)
    svgd_split_mean(const __grid_constant__ SplitTask task, int row_blocks) {
  const int64_t column = int64_t{blockIdx.x} * kSplitThreads + threadIdx.x;
  if (column == 0) {
    *task.maximum = 0;
    task.split.scale[1] = 0;
  }
  if (column >= task.particles.dim) return;
  double sum = 0;
  for (int block = 0; block < row_blocks; ++block) {
    sum += task.sums[block * task.particles.dim + column];
  }
  task.split.mean[column] = static_cast<float>(sum / static_cast<double>(task.particles.count));
}

__device__ inline unsigned warp_maximum(unsigned bits) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, mask));
  }
  return bits;
}

template <typename scalar>
__global__ void __launch_bounds__(kSplitThreads)
    svgd_split_maximum(const __grid_constant__ SplitTask task) {
  unsigned largest = 0;
  for_each_in_column<scalar>(task.particles, [&](float x, int64_t column) {
    largest = max(largest, __float_as_uint(fabsf(x - task.split.mean[column])));
  });
  largest = warp_maximum(largest);
  if (threadIdx.x % kWarpSize == 0) atomicMax(task.maximum, largest);
}

// The power of two that brings the largest |x - mean| to [2^8, 2^9); 1 where that is 0 or no
// number.
__device__ inline float split_scale(unsigned maximum_bits) {
  const float maximum = __uint_as_float(maximum_bits);
  if (!(maximum > 0) || isinf(maximum)) return 1;
  const int exponent = kLargestExponent - ilogbf(maximum);
  return ldexpf(1, min(max(exponent, -126), 127));
}

// A warp to a row.
template <typename scalar>
__global__ void __launch_bounds__(kSplitThreads)
    svgd_split_rows(const __grid_constant__ SplitTask task) {
  const SvgdParticles& particles = task.particles;
  const SplitParticles& split = task.split;
  const auto* data = static_cast<const scalar*>(particles.data);
  const float scale = split_scale(*task.maximum);
  const int lane = threadIdx.x % kWarpSize;
  constexpr int warps = kSplitThreads / kWarpSize;
  if (blockIdx.x == 0 && threadIdx.x == 0) split.scale[0] = scale;
  unsigned largest = 0;
  for (int64_t row = int64_t{blockIdx.x} * warps + threadIdx.x / kWarpSize;
       row < split.padded_count; row += int64_t{gridDim.x} * warps) {
    Sum<float> norm;
    for (int column = lane; column < split.padded_dim; column += kWarpSize) {
      const bool inside = row < particles.count && column < particles.dim;
      const float y =
          inside
              ? (to_accumulate(data[row * particles.stride + column]) - split.mean[column]) * scale
              : 0.0f;
      const __half high = __float2half_rn(y);
      split.high[row * split.padded_dim + column] = high;
      split.low[row * split.padded_dim + column] = __float2half_rn(y - __half2float(high));
      norm.value = fmaf(y, y, norm.value);
    }
    norm = reduce_group<Sum<float>>(norm, kWarpSize, nullptr);
    if (lane == 0) split.norms[row] = norm.value;
    largest = max(largest, __float_as_uint(norm.value));
  }
  if (lane == 0) atomicMax(reinterpret_cast<unsigned*>(&split.scale[1]), largest);
}

}  // namespace fused_ops
