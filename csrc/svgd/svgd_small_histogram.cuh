// SPDX-License-Identifier: BSD-3-Clause
// Counting a grid's distances in bins, and finding the bin of a rank: a pass of the selection in
// svgd_small_select.cuh.

#pragma once

#include "common/device/reduce.cuh"
#include "svgd/svgd_small_estimate.cuh"
#include "svgd/svgd_small_tile.cuh"

namespace fused_ops {

constexpr int kSmallBins = 4096;
constexpr int kGroupBins = 64;  // two to a lane, as are the groups
static_assert(kSmallBins == kGroupBins * kGroupBins);
constexpr int kWindowBins = 1024;  // the first counts all keys below the window
constexpr int kWindowShift = 12;   // half an octave: 2^22 keys
static_assert(1 << kWindowShift == kSmallBins);
constexpr unsigned kHalfWindow = (kWindowBins / 2) << kWindowShift;

// Groups of 64 bins are counted too where the bins are many and few of them used. One warp can then
// find a rank by two loads; 16 KB read by all blocks at once cost 1 us more.
struct alignas(16) SmallHistogram {
  unsigned groups[kGroupBins];
  unsigned bins[kSmallBins];
};

struct SmallSelectShared {
  alignas(16) unsigned window[kWindowBins + 1];  // the last counts all keys above, for nothing
  alignas(16) unsigned histogram[kSmallBins];
  float columns[2][kSampleThreads];
  unsigned warp_sums[kWindowBins / 4 / kWarpSize];
  unsigned bin, rank, total;
  Sum<double> sums[kWarpSize];
};

struct KeyRange {
  unsigned low;
  int shift;  // bins are 2^shift keys wide
  int bins;   // a multiple of 128
};

template <int threads>
__device__ inline void clear_histogram(unsigned* histogram, int bins) {
  for (int bin = 4 * threadIdx.x; bin < bins; bin += 4 * threads) {
    *reinterpret_cast<uint4*>(histogram + bin) = uint4{0, 0, 0, 0};
  }
}

// Fills the block's window, zero before: bin 0 takes what lies below the range, and the others move
// up by one. Most keys lie in it, so all are counted, without a branch. Ends in a barrier.
template <int size>
__device__ inline void count_window(const SmallDistances<size>& distances, const KeyRange& range,
                                    unsigned* window) {
  constexpr int patch = SmallShape<size>::patch;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      // What is no pair is above all.
      const unsigned key = min(__float_as_uint(distances.at[a][b]), 0x7fffffffu);
      const int bin = static_cast<int>(key - range.low) >> kWindowShift;
      // Shared memory adds a warp's ones to one address at once, so ties cost nothing more.
      atomicAdd(&window[1 + min(max(bin, -1), kWindowBins - 1)], 1u);
    }
  }
  __syncthreads();
}

// Fills the block's histogram, zero before. Ends in a barrier.
template <int size>
__device__ inline void count_keys(const SmallDistances<size>& distances, const KeyRange& range,
                                  unsigned* histogram) {
  constexpr int patch = SmallShape<size>::patch;
  const unsigned span = static_cast<unsigned>(range.bins) << range.shift;
  unsigned nearest = ~0u;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      nearest = min(nearest, __float_as_uint(distances.at[a][b]) - range.low);
    }
  }
  // In the second pass on most data, few threads have anything to count.
  if (nearest < span) {
#pragma unroll
    for (int a = 0; a < patch; ++a) {
#pragma unroll
      for (int b = 0; b < patch; ++b) {
        const unsigned offset = __float_as_uint(distances.at[a][b]) - range.low;
        if (offset < span) atomicAdd(&histogram[offset >> range.shift], 1u);
      }
    }
  }
  __syncthreads();
}

// Adds the block's counts to those of the grid.
template <int threads>
__device__ inline void flush_window(const unsigned* window, unsigned* result) {
  for (int bin = threadIdx.x; bin < kWindowBins; bin += threads) {
    if (window[bin] != 0) atomicAdd(&result[bin], window[bin]);
  }
}

// A group's count is added up by the half warp that holds it: where bins are dense, as in the
// passes that start over, all blocks' additions to a few groups would otherwise queue up.
template <int threads>
__device__ inline void flush_histogram(const unsigned* histogram, int bins,
                                       SmallHistogram& result) {
  constexpr int lanes = kGroupBins / 4;
#pragma unroll
  for (int first = 0; first < kSmallBins; first += 4 * threads) {
    const int bin = first + 4 * threadIdx.x;
    if (bin >= bins) break;  // whole warps: bins are a multiple of 128
    const auto counts = load<4>(histogram + bin);
    Sum<unsigned> sum{counts.value[0] + counts.value[1] + counts.value[2] + counts.value[3]};
    if (!__any_sync(0xffffffffu, sum.value != 0)) continue;
    for (int i = 0; i < 4; ++i) {
      if (counts.value[i] != 0) atomicAdd(&result.bins[bin + i], counts.value[i]);
    }
    sum = reduce_group<Sum<unsigned>>(sum, lanes, nullptr);
    if (threadIdx.x % lanes == 0 && sum.value != 0) {
      atomicAdd(&result.groups[bin / kGroupBins], sum.value);
    }
  }
}

struct SmallRankPlace {
  unsigned bin;
  unsigned rank;  // within the bin
  bool found;     // whether the histogram reaches the rank at all
};

// Of 64 counts, two neighbours to a lane, the one that holds the rank. The same in all lanes.
__device__ inline SmallRankPlace find_rank_among(uint2 counts, unsigned rank) {
  const int lane = threadIdx.x % kWarpSize;
  const unsigned sum = counts.x + counts.y;
  unsigned before = sum;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, before, offset);
    if (lane >= offset) before += other;
  }
  before -= sum;
  const unsigned holders = __ballot_sync(0xffffffffu, before <= rank && rank < before + sum);
  if (holders == 0) return {0, 0, false};
  const bool second = rank >= before + counts.x;
  const int holder = __ffs(holders) - 1;
  const unsigned bin = 2 * lane + second;
  const unsigned left = rank - before - (second ? counts.x : 0);
  return {__shfl_sync(0xffffffffu, bin, holder), __shfl_sync(0xffffffffu, left, holder), true};
}

// The bin of a complete histogram that holds the rank, found by one warp.
__device__ inline SmallRankPlace find_rank(const SmallHistogram& histogram, unsigned rank) {
  const int lane = threadIdx.x % kWarpSize;
  const auto load_pair = [&](const unsigned* counts) {
    return __ldcg(reinterpret_cast<const uint2*>(counts) + lane);
  };
  const SmallRankPlace group = find_rank_among(load_pair(histogram.groups), rank);
  if (!group.found) return group;
  SmallRankPlace place =
      find_rank_among(load_pair(histogram.bins + kGroupBins * group.bin), group.rank);
  place.bin += kGroupBins * group.bin;
  return place;
}

// The same in all threads of the block.
__device__ inline SmallRankPlace find_rank(const SmallHistogram& histogram, unsigned rank,
                                           SmallSelectShared& shared) {
  if (threadIdx.x < kWarpSize) {
    const SmallRankPlace place = find_rank(histogram, rank);
    if (threadIdx.x == 0) {
      shared.bin = place.bin;
      shared.rank = place.rank;
      shared.total = place.found;
    }
  }
  __syncthreads();
  const SmallRankPlace place{shared.bin, shared.rank, shared.total != 0};
  __syncthreads();
  return place;
}

// The same for the window, which the block's first threads read at once.
__device__ inline SmallRankPlace find_window_rank(const unsigned* window, unsigned rank,
                                                  SmallSelectShared& shared) {
  constexpr int readers = kWindowBins / 4;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  uint4 counts{};
  unsigned sum = 0;
  unsigned before = 0;
  if (threadIdx.x < readers) {
    counts = __ldcg(reinterpret_cast<const uint4*>(window) + threadIdx.x);
    sum = counts.x + counts.y + counts.z + counts.w;
    before = sum;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const unsigned other = __shfl_up_sync(0xffffffffu, before, offset);
      if (lane >= offset) before += other;
    }
    if (lane == kWarpSize - 1) shared.warp_sums[warp] = before;
  }
  __syncthreads();
  if (threadIdx.x < readers) {
    unsigned total = 0;
#pragma unroll
    for (int other = 0; other < readers / kWarpSize; ++other) {
      const unsigned warp_sum = shared.warp_sums[other];
      if (other < warp) before += warp_sum;
      total += warp_sum;
    }
    before -= sum;
    if (before <= rank && rank < before + sum) {
      const unsigned second = before + counts.x;
      const unsigned third = second + counts.y;
      const unsigned fourth = third + counts.z;
      const unsigned bin = (rank >= second) + (rank >= third) + (rank >= fourth);
      shared.bin = 4 * threadIdx.x + bin;
      shared.rank = rank - (bin == 0 ? before : bin == 1 ? second : bin == 2 ? third : fourth);
    }
    if (threadIdx.x == 0) shared.total = total;
  }
  __syncthreads();
  return {shared.bin, shared.rank, rank < shared.total};
}

}  // namespace fused_ops
