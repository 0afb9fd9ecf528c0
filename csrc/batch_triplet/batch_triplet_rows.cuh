// SPDX-License-Identifier: BSD-3-Clause
// What surrounds the mining: the rows before it, losses and gradients after it.
//
// A warp has a row, its lanes neighbouring columns. "hard" has two coefficients an anchor, so a
// row's gradient looks through the picks of all anchors for itself, 32 at a time and in their
// order, and adds differences of rows, in which nothing cancels.

#pragma once

#include <cmath>
#include <cstdint>

#include "batch_triplet/batch_triplet_formula.h"
#include "common/device/reduce.cuh"
#include "common/device/vector.cuh"

namespace fused_ops {

constexpr int kRowsPerBlock = 8;  // of one warp each
constexpr int kReduceThreads = 1024;
constexpr int kTileRows = 8;  // of 32 that a pass of a transposing block covers
constexpr int kStagedPicks = 256;
constexpr int kHeldColumns = 16;  // of a row's gradient that a lane holds at a time

template <typename scalar>
using Accumulated = typename AccumulateType<scalar>::type;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarpSize; }

__device__ inline BatchTotals shuffle_xor(const BatchTotals& value, int mask) {
  constexpr unsigned all = 0xffffffffu;
  return {
      __shfl_xor_sync(all, value.loss, mask),      __shfl_xor_sync(all, value.items, mask),
      __shfl_xor_sync(all, value.active, mask),    __shfl_xor_sync(all, value.positive_sum, mask),
      __shfl_xor_sync(all, value.positives, mask), __shfl_xor_sync(all, value.negative_sum, mask),
      __shfl_xor_sync(all, value.negatives, mask)};
}

// A block of 32 x 32 threads for 32 columns. What is not finite would make every row so.
template <typename scalar>
__global__ void batch_centre_kernel(const scalar* rows, int64_t count, int64_t stride, int64_t dim,
                                    Accumulated<scalar>* centre) {
  using T = Accumulated<scalar>;
  __shared__ T parts[kWarpSize][kWarpSize + 1];
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + threadIdx.x;
  const int64_t step = (count + kCentreRows - 1) / kCentreRows;
  const int64_t sampled = (count + step - 1) / step;
  T sum = 0;
  if (column < dim) {
    for (int64_t j = threadIdx.y; j < sampled; j += kWarpSize) {
      sum += to_accumulate(rows[j * step * stride + column]);
    }
  }
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < dim) {
    for (int y = 1; y < kWarpSize; ++y) sum += parts[y][threadIdx.x];
    centre[column] = isfinite(sum) ? sum / static_cast<T>(sampled) : T(0);
  }
}

template <typename scalar>
__global__ void batch_prepare_kernel(BatchRows rows, int64_t dim,
                                     const Accumulated<scalar>* centre) {
  using T = Accumulated<scalar>;
  const int64_t row = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarpSize;
  const int64_t width = prepared_width(dim);
  Sum<T> norm;
  if (row < rows.count) {
    const scalar* from = static_cast<const scalar*>(rows.data) + row * rows.stride;
    T* to = static_cast<T*>(rows.prepared) + row * width;
    for (int64_t k = lane_id(); k < width; k += kWarpSize) {
      const T value = k < dim ? to_accumulate(from[k]) - centre[k] : T(k == dim);
      to[k] = value;
      if (k < dim) norm.value += value * value;
    }
  }
  norm = reduce_group<Sum<T>>(norm, kWarpSize, nullptr);
  if (row < rows.count && lane_id() == 0) static_cast<T*>(rows.norms)[row] = norm.value;
}

// A block for a tile of 32 x 32 and its mirror image: those on or right of the diagonal work.
template <typename T>
__global__ void batch_symmetrise_kernel(T* c, int64_t count) {
  if (blockIdx.y > blockIdx.x) return;
  __shared__ T tile[kWarpSize][kWarpSize + 1], mirrored[kWarpSize][kWarpSize + 1];
  const int64_t row = int64_t{blockIdx.y} * kWarpSize, column = int64_t{blockIdx.x} * kWarpSize;
  const int x = static_cast<int>(threadIdx.x);
  for (int y = threadIdx.y; y < kWarpSize; y += kTileRows) {
    if (row + y < count && column + x < count) tile[y][x] = c[(row + y) * count + column + x];
    if (column + y < count && row + x < count) mirrored[y][x] = c[(column + y) * count + row + x];
  }
  __syncthreads();
  for (int y = threadIdx.y; y < kWarpSize; y += kTileRows) {
    if (row + y < count && column + x < count) {
      c[(row + y) * count + column + x] = tile[y][x] + mirrored[x][y];
    }
    if (column + y < count && row + x < count) {
      c[(column + y) * count + row + x] = mirrored[y][x] + tile[x][y];
    }
  }
}

template <typename T>
__global__ void batch_add_kernel(T* into, const T* values, int64_t count) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += threads) {
    into[i] += values[i];
  }
}

// One block.
template <typename T>
__global__ void batch_reduce_kernel(const BatchTotals* anchors, int64_t count,
                                    BatchReduction reduction, T* loss, BatchTotals* totals,
                                    double* scale) {
  __shared__ BatchTotals shared[kReduceThreads / kWarpSize];
  BatchTotals sum{};
  for (int64_t i = threadIdx.x; i < count; i += kReduceThreads) {
    sum.merge(anchors[i]);
    if (reduction == BatchReduction::none) loss[i] = static_cast<T>(anchors[i].loss);
  }
  sum = reduce_group(sum, kReduceThreads, shared);
  if (threadIdx.x > 0) return;
  *scale = loss_scale(sum, reduction);
  if (reduction != BatchReduction::none) *loss = static_cast<T>(sum.loss * *scale);
  *totals = sum;
}

template <typename T>
__global__ void batch_gradient_kernel(BatchRows rows, const T* sums, const T* more_sums,
                                      const double* scale, int64_t dim, T* gradient) {
  const int64_t row = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarpSize;
  if (row >= rows.count) return;
  const int64_t at = row * prepared_width(dim), one = at + dim;
  const T* x = static_cast<const T*>(rows.prepared) + at;
  const T factor = static_cast<T>(*scale);
  const T total = sums[one] + (more_sums == nullptr ? T(0) : more_sums[one]);
  for (int64_t k = lane_id(); k < dim; k += kWarpSize) {
    const T sum = sums[at + k] + (more_sums == nullptr ? T(0) : more_sums[at + k]);
    gradient[row * dim + k] = factor * (total * x[k] - sum);
  }
}

// The part of a row's gradient that a lane holds: columns first + lane + 32 c.
template <typename scalar>
struct HeldGradient {
  using T = Accumulated<scalar>;

  // sum += c (a - b)
  __device__ void add(T c, const scalar* a, const scalar* b) {
    if (c == 0) return;
#pragma unroll
    for (int i = 0; i < kHeldColumns; ++i) {
      const int64_t k = first + i * kWarpSize;
      if (k < dim) sum[i] += c * (to_accumulate(a[k]) - to_accumulate(b[k]));
    }
  }

  int64_t first;  // the lane's first column
  int64_t dim;
  T sum[kHeldColumns];
};

template <typename scalar>
__global__ void batch_hard_gradient_kernel(BatchRows anchors, BatchRows references, int64_t dim,
                                           bool as_anchors, bool as_references, int64_t count,
                                           const HardPicks<Accumulated<scalar>>* picks,
                                           const double* scale, Accumulated<scalar>* gradient) {
  using T = Accumulated<scalar>;
  __shared__ int64_t picked[2][kStagedPicks];
  const int64_t row = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarpSize;
  const scalar* const x = static_cast<const scalar*>(anchors.data);
  const scalar* const y = static_cast<const scalar*>(references.data);
  for (int64_t first = 0; first < dim; first += kHeldColumns * kWarpSize) {
    HeldGradient<scalar> held{first + lane_id(), dim, {}};
    if (as_anchors && row < count && picks[row].positive >= 0) {
      const HardPicks<T> pick = picks[row];
      const scalar* own = x + row * anchors.stride;
      held.add(pick.positive_coefficient, own, y + pick.positive * references.stride);
      held.add(pick.negative_coefficient, own, y + pick.negative * references.stride);
    }
    for (int64_t begin = 0; as_references && begin < anchors.count; begin += kStagedPicks) {
      __syncthreads();  // until the last ones are read
      const int64_t staged = begin + threadIdx.x;
      if (threadIdx.x < kStagedPicks) {
        picked[0][threadIdx.x] = staged < anchors.count ? picks[staged].positive : -1;
        picked[1][threadIdx.x] = staged < anchors.count ? picks[staged].negative : -1;
      }
      __syncthreads();
      for (int group = 0; group < kStagedPicks; group += kWarpSize) {
        for (int side = 0; side < 2; ++side) {
          unsigned found = __ballot_sync(0xffffffffu, picked[side][group + lane_id()] == row);
          while (found != 0) {
            const int64_t i = begin + group + __ffs(static_cast<int>(found)) - 1;
            found &= found - 1;
            const T c = side == 0 ? picks[i].positive_coefficient : picks[i].negative_coefficient;
            held.add(c, y + row * references.stride, x + i * anchors.stride);
          }
        }
      }
    }
    if (row < count) {
      const T factor = static_cast<T>(*scale);
#pragma unroll
      for (int i = 0; i < kHeldColumns; ++i) {
        const int64_t k = held.first + i * kWarpSize;
        if (k < dim) gradient[row * dim + k] = factor * held.sum[i];
      }
    }
  }
}

}  // namespace fused_ops
