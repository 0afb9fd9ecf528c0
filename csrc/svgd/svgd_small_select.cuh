// SPDX-License-Identifier: BSD-3-Clause
// The exact median over a cooperative grid whose blocks hold their distances in registers.
//
// A non-negative float orders as its bits, its key, do. A pass counts the keys of a range in equal
// bins: in shared memory first, then by sparse integer atomics in device memory; after a barrier of
// the grid every block picks the bin that holds the rank. A pass with its barrier costs 3 to 4 us,
// so the first one is not a digit of the key but a window of half an octave around an estimate of
// the median, whose bins the second pass resolves exactly. Where the window misses, three passes of
// 12 + 12 + 7 bits start over.
//
// All blocks take the same decisions, because they see the same counts and compute the estimate in
// the same order.

#pragma once

#include <cooperative_groups.h>

#include <utility>

#include "svgd/svgd_device.cuh"
#include "svgd/svgd_formula.h"
#include "svgd/svgd_small_histogram.cuh"

namespace fused_ops {

using GridToken = cooperative_groups::grid_group::arrival_token;

constexpr int kSmallPasses = 5;  // the window, its bin; or three digits

// In device memory, zero at first.
struct alignas(16) SmallMedianScratch {
  unsigned window[kWindowBins];
  SmallHistogram histograms[kSmallPasses - 1];
  unsigned next_above;  // complement of the smallest key above the one found
  unsigned nan;         // whether any distance is NaN
  unsigned unused[2];
};
static_assert(sizeof(SmallMedianScratch) % 16 == 0);

// The grid's blocks share the work. A barrier must follow.
template <int threads>
__device__ inline void clear_scratch(SmallMedianScratch* scratch) {
  auto* words = reinterpret_cast<uint4*>(scratch);
  constexpr int size = sizeof(SmallMedianScratch) / sizeof(uint4);
  for (int i = blockIdx.x * threads + threadIdx.x; i < size; i += gridDim.x * threads) {
    words[i] = uint4{0, 0, 0, 0};
  }
}

__device__ inline KeyRange window_around(float estimate) {
  const bool usable = estimate > 0 && __float_as_uint(estimate) < kInfinityKey;
  const unsigned key = usable ? __float_as_uint(estimate) : 0;
  return {key > kHalfWindow ? key - kHalfWindow : 0, kWindowShift, kWindowBins};
}

// The smallest distance above `key`, over the grid.
template <int size>
__device__ inline float next_above(const SmallDistances<size>& distances, unsigned key,
                                   SmallMedianScratch* scratch) {
  constexpr int patch = SmallShape<size>::patch;
  Maximum complement;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      const unsigned other = __float_as_uint(distances.at[a][b]);
      if (other > key && other <= kInfinityKey) complement.merge({~other});
    }
  }
  complement = reduce_group<Maximum>(complement, kWarpSize, nullptr);
  if (threadIdx.x % kWarpSize == 0) atomicMax(&scratch->next_above, complement.bits);
  cooperative_groups::this_grid().sync();
  return __uint_as_float(~__ldcg(&scratch->next_above));
}

struct MiddleDistances {
  float lower;
  float upper;
};

// The distances of rank `rank` and, with `mean_of_two`, of the next. Called after the window has
// been counted, with a histogram of zeros; `waiting` is the barrier that follows clear_scratch.
template <int size>
__device__ inline MiddleDistances select_distances(const SmallDistances<size>& distances,
                                                   KeyRange range, unsigned rank, bool mean_of_two,
                                                   GridToken waiting, SmallMedianScratch* scratch,
                                                   SmallSelectShared& shared) {
  constexpr int patch = SmallShape<size>::patch;
  constexpr int threads = SmallShape<size>::threads;
  const auto grid = cooperative_groups::this_grid();
  bool nan = false;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) nan |= distances.at[a][b] != distances.at[a][b];
  }
  grid.barrier_wait(std::move(waiting));
  flush_window<threads>(shared.window, scratch->window);
  if (nan) scratch->nan = 1;  // every writer writes the same
  grid.sync();
  const unsigned any_nan = __ldcg(&scratch->nan);  // on its way while the rank is looked for
  SmallRankPlace place = find_window_rank(scratch->window, rank, shared);
  const float not_a_number = std::numeric_limits<float>::quiet_NaN();
  if (any_nan != 0) return {not_a_number, not_a_number};
  int pass = 0;
  if (place.found && place.bin > 0) {
    range = {range.low + ((place.bin - 1) << range.shift), 0, kSmallBins};
    rank = place.rank;
  } else {
    range = {0, 19, kSmallBins};
    pass = 1;
  }
  while (true) {
    count_keys(distances, range, shared.histogram);
    flush_histogram<threads>(shared.histogram, range.bins, scratch->histograms[pass]);
    grid.sync();
    place = find_rank(scratch->histograms[pass], rank, shared);
    if (range.shift == 0) break;
    clear_histogram<threads>(shared.histogram, kSmallBins);
    __syncthreads();
    const unsigned low = range.low + (place.bin << range.shift);
    range = range.shift == 19 ? KeyRange{low, 7, kSmallBins} : KeyRange{low, 0, 128};
    rank = place.rank;
    ++pass;
  }
  const unsigned key = range.low + place.bin;
  const float lower = __uint_as_float(key);
  if (!mean_of_two) return {lower, lower};
  const SmallRankPlace next = find_rank(scratch->histograms[pass], rank + 1, shared);
  return {lower,
          next.found ? __uint_as_float(range.low + next.bin) : next_above(distances, key, scratch)};
}

// The mean distance of the pairs, NaN included, by a sum in a fixed order. `partial` holds a number
// per block.
template <int size>
__device__ inline double mean_distance(const SmallDistances<size>& distances, int64_t count,
                                       double* partial, SmallSelectShared& shared) {
  constexpr int patch = SmallShape<size>::patch;
  constexpr int threads = SmallShape<size>::threads;
  Sum<double> sum;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      if (!(distances.at[a][b] < 0)) sum.value += distances.at[a][b];
    }
  }
  sum = reduce_group(sum, threads, shared.sums);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum.value;
  cooperative_groups::this_grid().sync();
  Sum<double> total;
  for (int block = threadIdx.x; block < gridDim.x; block += threads) {
    total.value += __ldcg(&partial[block]);
  }
  total = reduce_group(total, threads, shared.sums);
  return total.value / (static_cast<double>(count) * static_cast<double>(count - 1) / 2);
}

}  // namespace fused_ops
