// SPDX-License-Identifier: BSD-3-Clause
// An estimate of the median squared distance, around which the exact one is looked for. All blocks
// compute it from the same sample in the same order, so that they agree on it.

#pragma once

#include "common/device/reduce.cuh"
#include "common/device/vector.cuh"
#include "svgd/svgd.h"

namespace fused_ops {

constexpr int kSampleThreads = 256;

// A strided sample of the particles, of which the estimate needs the variances. Each of the block's
// first threads takes some rows of one dimension.
struct SmallSample {
  static constexpr int rows_per_thread = 16;
  int dim;    // dimensions looked at
  int width;  // threads side by side in a row
  int rows;
  float origin;
  float values[rows_per_thread];

  __device__ void load(const SvgdParticles& particles) {
    const int count = static_cast<int>(particles.count);
    dim = particles.dim < kSampleThreads ? static_cast<int>(particles.dim) : kSampleThreads;
    width = 1;
    while (width < dim) width *= 2;
    const int together = kSampleThreads / width;  // rows
    const int wanted = rows_per_thread * together;
    const int step = count > wanted ? count / wanted : 1;
    rows = count < wanted ? count : wanted;
    if (threadIdx.x >= kSampleThreads) return;
    const int column = threadIdx.x % width;
    const int row = threadIdx.x / width;
    const auto* data = static_cast<const float*>(particles.data) + (column < dim ? column : 0);
    origin = data[0];
    const int64_t stride = step * particles.stride;
    data += row * stride;
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
      values[i] = row + i * together < rows ? *data : origin;
      data += together * stride;
    }
  }

  __device__ int lanes() const { return width < kWarpSize ? width : kWarpSize; }

  // Leaves the warps' sums in `columns`. A barrier must follow.
  __device__ void sum(float (&columns)[2][kSampleThreads]) const {
    if (threadIdx.x >= kSampleThreads) return;
    float sum = 0;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
      sum += values[i] - origin;
      squares = fma(values[i] - origin, values[i] - origin, squares);
    }
    for (int offset = kWarpSize / 2; offset >= width; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    const int lane = threadIdx.x % kWarpSize;
    if (lane >= lanes()) return;
    columns[0][threadIdx.x / kWarpSize * lanes() + lane] = sum;
    columns[1][threadIdx.x / kWarpSize * lanes() + lane] = squares;
  }
};

// About the median squared distance of `all_dims` dimensions: the mean is twice the sum of the
// variances, and the median of a gamma variable of that many degrees of freedom lies below it by
// the approximation of Wilson and Hilferty. Only speed depends on it. Every warp computes it alone,
// which needs no barrier.
__device__ inline float estimate_median(const SmallSample& sample, int64_t all_dims,
                                        const float (&columns)[2][kSampleThreads]) {
  const auto rows = static_cast<float>(sample.rows);
  Sum<float> variance, power;
  for (int column = threadIdx.x % kWarpSize; column < sample.dim; column += kWarpSize) {
    float total = 0;
    float squares = 0;
    for (int i = column; i < kSampleThreads / kWarpSize * sample.lanes(); i += sample.width) {
      total += columns[0][i];
      squares += columns[1][i];
    }
    const float mean = __fdividef(total, rows);
    const float one = __fdividef(squares, rows) - mean * mean;
    variance.value += one;
    power.value = fma(one, one, power.value);
  }
  variance = reduce_group<Sum<float>>(variance, kWarpSize, nullptr);
  power = reduce_group<Sum<float>>(power, kWarpSize, nullptr);
  const float freedom = __fdividef(variance.value * variance.value, power.value);
  const float below = 1.0f - __fdividef(2.0f, 9.0f * freedom);
  const float unbiased = __fdividef(rows, rows > 1 ? rows - 1 : 1);
  return 2.0f * variance.value * unbiased * below * below * below *
         __fdividef(static_cast<float>(all_dims), static_cast<float>(sample.dim));
}

}  // namespace fused_ops
