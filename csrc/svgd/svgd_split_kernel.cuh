// SPDX-License-Identifier: BSD-3-Clause
// Splits particles into halves around their mean (svgd_split.h).
//
// svgd_split_columns  sums, in float64, and extremes of the columns of a share of the rows
// svgd_split_mean     their mean, in a fixed order, and the largest |x - mean|
// svgd_split_rows     halves and norms
//
// Maxima are taken by integer atomics on the bits of non-negative floats, whose order does not
// matter; NaN is above all, so that it is not lost.

#pragma once

#include "common/device/reduce.cuh"
#include "common/device/vector.cuh"
#include "common/device/wgmma.cuh"
#include "svgd/svgd_split.h"

namespace fused_ops {

constexpr int kSplitThreads = 256;
constexpr int kSplitColumns = 64;  // of a block; each has kSplitThreads / kSplitColumns threads
constexpr int kSplitRowBlocks = 64;
constexpr int kSplitMeanThreads = 8;                            // to a column
constexpr int kSplitMeans = kSplitThreads / kSplitMeanThreads;  // of a block
constexpr int kLargestExponent = 8;

struct SplitColumn {
  double sum = 0;
  float least = INFINITY;
  float most = -INFINITY;

  __device__ void merge(const SplitColumn& other) {
    sum += other.sum;
    least = fminf(least, other.least);
    most = fmaxf(most, other.most);
  }
};

__device__ inline SplitColumn shuffle_xor(const SplitColumn& column, int mask) {
  return {__shfl_xor_sync(0xffffffffu, column.sum, mask),
          __shfl_xor_sync(0xffffffffu, column.least, mask),
          __shfl_xor_sync(0xffffffffu, column.most, mask)};
}

struct SplitTask {
  SvgdParticles particles;
  SplitParticles split;
  SplitColumn* columns;  // (kSplitRowBlocks, dim)
  unsigned* maximum;     // bits of the largest |x - mean|
};

static __global__ void __launch_bounds__(kSplitThreads)
    svgd_split_columns(const __grid_constant__ SplitTask task) {
  __shared__ SplitColumn shared[kSplitThreads];
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    *task.maximum = 0;
    task.split.scale[1] = 0;
  }
  const SvgdParticles& particles = task.particles;
  const auto* data = static_cast<const float*>(particles.data);
  const int64_t column = int64_t{blockIdx.x} * kSplitColumns + threadIdx.x % kSplitColumns;
  constexpr int lanes = kSplitThreads / kSplitColumns;
  SplitColumn result;
  if (column < particles.dim) {
#pragma unroll 4
    for (int64_t row = int64_t{blockIdx.y} * lanes + threadIdx.x / kSplitColumns;
         row < particles.count; row += int64_t{gridDim.y} * lanes) {
      const float x = data[row * particles.stride + column];
      result.merge({x, x, x});
    }
  }
  shared[threadIdx.x] = result;
  __syncthreads();
  if (threadIdx.x >= kSplitColumns || column >= particles.dim) return;
  for (int other = kSplitColumns; other < kSplitThreads; other += kSplitColumns) {
    result.merge(shared[threadIdx.x + other]);
  }
  task.columns[blockIdx.y * particles.dim + column] = result;
}

// A group of eight threads to a column.
static __global__ void __launch_bounds__(kSplitThreads)
    svgd_split_mean(const __grid_constant__ SplitTask task) {
  const int64_t column = int64_t{blockIdx.x} * kSplitMeans + threadIdx.x / kSplitMeanThreads;
  SplitColumn total;
  if (column < task.particles.dim) {
#pragma unroll
    for (int block = threadIdx.x % kSplitMeanThreads; block < kSplitRowBlocks;
         block += kSplitMeanThreads) {
      total.merge(task.columns[block * task.particles.dim + column]);
    }
  }
  total = reduce_group<SplitColumn>(total, kSplitMeanThreads, nullptr);
  if (column >= task.particles.dim || threadIdx.x % kSplitMeanThreads != 0) return;
  const auto mean = static_cast<float>(total.sum / static_cast<double>(task.particles.count));
  task.split.mean[column] = mean;
  // Subtraction is monotonic, rounded or not: one of the extremes is furthest from the mean.
  atomicMax(task.maximum, max(__float_as_uint(fabsf(total.least - mean)),
                              __float_as_uint(fabsf(total.most - mean))));
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
static __global__ void __launch_bounds__(kSplitThreads)
    svgd_split_rows(const __grid_constant__ SplitTask task) {
  const SvgdParticles& particles = task.particles;
  const SplitParticles& split = task.split;
  const auto* data = static_cast<const float*>(particles.data);
  const float scale = split_scale(*task.maximum);
  const int width = split_width(split.padded_dim);
  const int chunks = split.padded_dim / width;
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
          inside ? (data[row * particles.stride + column] - split.mean[column]) * scale : 0.0f;
      norm.value = fmaf(y, y, norm.value);
      if (split.slots == nullptr) continue;
      const __half high = __float2half_rn(y);
      __half* slot = split.slots + (row / kSplitTile * chunks + column / width) *
                                       static_cast<int64_t>(split_slot_size(width));
      const auto line = static_cast<int>(row % kSplitTile);
      const int offset = swizzled((line * width + column % width) * 2, width * 2) / 2;
      slot[offset] = high;
      slot[offset + kSplitTile * width] = __float2half_rn(y - __half2float(high));
    }
    norm = reduce_group<Sum<float>>(norm, kWarpSize, nullptr);
    const bool padded = row >= particles.count;
    if (lane == 0) split.norms[row] = padded ? INFINITY : norm.value;
    if (!padded) largest = max(largest, __float_as_uint(norm.value));
  }
  if (lane == 0) atomicMax(reinterpret_cast<unsigned*>(&split.scale[1]), largest);
}

}  // namespace fused_ops
