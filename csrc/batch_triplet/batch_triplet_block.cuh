// SPDX-License-Identifier: BSD-3-Clause
// What a block does with its anchor's row, whatever it mines: distances, positives, sorted pieces.

#pragma once

#include <cstdint>

#include "batch_triplet/batch_triplet_launch.h"
#include "batch_triplet/batch_triplet_rows.cuh"

namespace fused_ops {

constexpr int kMineThreads = 256;
constexpr int kMineWarps = kMineThreads / kWarpSize;
constexpr int kHeldBins = kMostPositives / kMineThreads;
static_assert(kMostPositives % kMineThreads == 0, "threads hold whole shares of the bins");

// The largest value, and of equal ones the smallest index.
template <typename T>
struct Largest {
  T value;
  int64_t index = INT64_MAX;
  __device__ void merge(const Largest& other) {
    if (other.index == INT64_MAX) return;
    if (index == INT64_MAX || other.value > value ||
        (other.value == value && other.index < index)) {
      *this = other;
    }
  }
};

template <typename T>
__device__ inline Largest<T> shuffle_xor(const Largest<T>& largest, int mask) {
  return {__shfl_xor_sync(0xffffffffu, largest.value, mask),
          __shfl_xor_sync(0xffffffffu, largest.index, mask)};
}

// How many of `size` ascending values, plus the offset, are below `value`, or with `equal` not
// above.
template <bool equal, typename T>
__device__ inline int rank_in(const T* sorted, int size, T value, T offset = 0) {
  int low = 0;
  while (size > 0) {
    const int half = size / 2;
    const T middle = sorted[low + half] + offset;
    if (middle < value || (equal && middle == value)) {
      low += half + 1;
      size -= half + 1;
    } else {
      size = half;
    }
  }
  return low;
}

// Bitonic, in place, of `size` values in memory for the next power of two.
template <typename T>
__device__ inline void sort_in_block(T* values, int size) {
  int padded = 1;
  while (padded < size) padded *= 2;
  for (int i = size + static_cast<int>(threadIdx.x); i < padded; i += kMineThreads) {
    values[i] = static_cast<T>(INFINITY);
  }
  for (int run = 2; run <= padded; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < padded / 2; i += kMineThreads) {
        const int low = i / distance * 2 * distance + i % distance, high = low + distance;
        const bool ascending = (low & run) == 0;
        const T a = values[low], b = values[high];
        if ((a > b) == ascending) {
          values[low] = b;
          values[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

struct AddInts {
  static __device__ int merge(int a, int b) { return a + b; }
};
struct MinInts {
  static __device__ int merge(int a, int b) { return a < b ? a : b; }
};

// values[k] merged with all before it, or with `from_end` all behind it; `size` of them.
template <typename Merge, bool from_end>
__device__ inline void scan_in_block(int* values, int size) {
  for (int reach = 1; reach < size; reach *= 2) {
    int merged[kHeldBins];
#pragma unroll
    for (int held = 0; held < kHeldBins; ++held) {
      const int k = static_cast<int>(threadIdx.x) + held * kMineThreads;
      const int other = from_end ? k + reach : k - reach;
      if (k < size) merged[held] = values[k];
      if (k < size && other >= 0 && other < size) {
        merged[held] = Merge::merge(merged[held], values[other]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int held = 0; held < kHeldBins; ++held) {
      const int k = static_cast<int>(threadIdx.x) + held * kMineThreads;
      if (k < size) values[k] = merged[held];
    }
    __syncthreads();
  }
}

// The row of one anchor. Columns are shared out twice: neighbouring ones to neighbouring threads of
// the whole block, and where their order matters as one range to each warp.
template <typename scalar>
struct AnchorRow {
  using T = Accumulated<scalar>;

  __device__ AnchorRow(const BatchTriplet& call, const BatchChunk& chunk)
      : call(call),
        anchor(chunk.first + blockIdx.x),
        row(static_cast<T*>(chunk.products) + int64_t{blockIdx.x} * call.references.count),
        count(call.references.count),
        own(call.first_own < 0 ? -1 : call.first_own + anchor),
        label(call.anchors.labels[anchor]),
        weight(call.weights == nullptr ? T(1) : static_cast<const T*>(call.weights)[anchor]) {
    const int64_t range = (count + kMineThreads - 1) / kMineThreads * kWarpSize;
    begin = range * (threadIdx.x / kWarpSize);
    begin = begin < count ? begin : count;
    end = begin + range < count ? begin + range : count;
  }

  __device__ bool has_label(int64_t j) const { return call.references.labels[j] == label; }
  __device__ T coefficient(T gradient, T d) const {
    return pair_coefficient(weight * gradient, d, call.distance);
  }

  // |x - y_j|^2 by the whole warp.
  __device__ T squared_difference(int64_t j) const {
    const scalar* x = static_cast<const scalar*>(call.anchors.data) + anchor * call.anchors.stride;
    const scalar* y = static_cast<const scalar*>(call.references.data) + j * call.references.stride;
    Sum<T> sum;
    for (int64_t k = lane_id(); k < call.dim; k += kWarpSize) {
      const T difference = to_accumulate(x[k]) - to_accumulate(y[k]);
      sum.value += difference * difference;
    }
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) sum.merge(shuffle_xor(sum, mask));
    return sum.value;
  }

  // Distances in the place of products. Finds the number of positives, those in the ranges of
  // earlier warps, the first NaN, and the sums of both kinds of distances for the totals.
  __device__ void form_distances(BatchTotals& totals) {
    __shared__ int64_t counts[kMineWarps];
    __shared__ unsigned long long first_nan_of_block;
    if (threadIdx.x == 0) first_nan_of_block = INT64_MAX;
    const T norm = static_cast<const T*>(call.anchors.norms)[anchor];
    const T* const norms = static_cast<const T*>(call.references.norms);
    int64_t found = 0, nan = INT64_MAX;
    for (int64_t first = begin; first < end; first += kWarpSize) {
      const int64_t j = first + lane_id();
      bool near = false;
      T squared = 0;
      if (j < end && j != own) squared = squared_from_product(row[j], norm, norms[j], near);
      for (unsigned left = __ballot_sync(0xffffffffu, near); left != 0; left &= left - 1) {
        const int lane = __ffs(static_cast<int>(left)) - 1;
        const T exact = squared_difference(first + lane);
        if (lane == lane_id()) squared = exact;
      }
      const bool positive = j < end && j != own && has_label(j);
      found += __popc(__ballot_sync(0xffffffffu, positive));
      if (j >= end) continue;
      const T d = distance_from_squared(squared, call.distance);
      row[j] = d;
      if (j == own) continue;
      if (d != d && j < nan) nan = j;
      (positive ? totals.positive_sum : totals.negative_sum) += d;
    }
    __syncthreads();
    if (lane_id() == 0) counts[threadIdx.x / kWarpSize] = found;
    if (nan != INT64_MAX) atomicMin(&first_nan_of_block, static_cast<unsigned long long>(nan));
    __syncthreads();
    positives = earlier = 0;
    for (int warp = 0; warp < kMineWarps; ++warp) {
      if (warp == static_cast<int>(threadIdx.x) / kWarpSize) earlier = positives;
      positives += counts[warp];
    }
    negatives = count - positives - (own < 0 ? 0 : 1);
    first_nan = static_cast<int64_t>(first_nan_of_block);
  }

  // Calls `visit(j, rank)` for the positives whose rank, in the order of columns, is in
  // [first, first + size).
  template <typename Visit>
  __device__ void for_positives(int64_t first, int size, const Visit& visit) const {
    int64_t rank = earlier;
    for (int64_t column = begin; column < end && rank < first + size; column += kWarpSize) {
      const int64_t j = column + lane_id();
      const bool positive = j < end && j != own && has_label(j);
      const unsigned found = __ballot_sync(0xffffffffu, positive);
      const int64_t at = rank + __popc(found & ((1u << lane_id()) - 1));
      if (positive && at >= first && at < first + size) visit(j, static_cast<int>(at - first));
      rank += __popc(found);
    }
  }

  // Calls `visit(j)` for the negatives.
  template <typename Visit>
  __device__ void for_negatives(const Visit& visit) const {
    for (int64_t j = threadIdx.x; j < count; j += kMineThreads) {
      if (!has_label(j)) visit(j);
    }
  }

  __device__ void fill(T value) const {
    for (int64_t j = threadIdx.x; j < count; j += kMineThreads) row[j] = value;
  }

  const BatchTriplet& call;
  int64_t anchor;
  T* row;
  int64_t count;
  int64_t own;
  int64_t label;
  T weight;
  int64_t begin, end;  // the warp's range
  int64_t positives, earlier, negatives;
  int64_t first_nan;  // INT64_MAX where there is none
};

}  // namespace fused_ops
