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

#include "common/device/reduce.cuh"
#include "svgd/svgd_formula.h"
#include "svgd/svgd_small_tile.cuh"

namespace fused_ops {

using GridToken = cooperative_groups::grid_group::arrival_token;

constexpr int kSmallBins = 4096;
constexpr int kGroupBins = 64;  // two to a lane, as are the groups
static_assert(kSmallBins == kGroupBins * kGroupBins);
constexpr int kWindowBins = 1024;  // the first counts all keys below the window
constexpr int kWindowShift = 12;   // half an octave: 2^22 keys
static_assert(1 << kWindowShift == kSmallBins);
constexpr unsigned kHalfWindow = (kWindowBins / 2) << kWindowShift;
constexpr int kSmallPasses = 5;  // the window, its bin; or three digits
constexpr unsigned kInfinityKey = 0x7f800000u;

// In device memory, zero at first.
// Groups of 64 bins are counted too where the bins are many and few of them used. One warp can then
// find a rank by two loads; 16 KB read by all blocks at once cost 1 us more.
struct alignas(16) SmallHistogram {
  unsigned groups[kGroupBins];
  unsigned bins[kSmallBins];
};

struct alignas(16) SmallMedianScratch {
  unsigned window[kWindowBins];
  SmallHistogram histograms[kSmallPasses - 1];
  unsigned next_above;  // complement of the smallest key above the one found
  unsigned nan;         // whether any distance is NaN
  unsigned unused[2];
};
static_assert(sizeof(SmallMedianScratch) % 16 == 0);

constexpr int kSampleThreads = 256;

struct SmallSelectShared {
  alignas(16) unsigned window[kWindowBins];
  alignas(16) unsigned histogram[kSmallBins];
  float columns[2][kSampleThreads];
  unsigned warp_sums[kWindowBins / 4 / kWarpSize];
  unsigned bin, rank, total;
  Sum<double> sums[kWarpSize];
};

struct KeyRange {
  unsigned low;
  int shift;  // bins are 2^shift keys wide
  int bins;   // a multiple of kGroupBins
};

// The grid's blocks share the work. A barrier must follow.
template <int threads>
__device__ inline void clear_scratch(SmallMedianScratch* scratch) {
  auto* words = reinterpret_cast<uint4*>(scratch);
  constexpr int size = sizeof(SmallMedianScratch) / sizeof(uint4);
  for (int i = blockIdx.x * threads + threadIdx.x; i < size; i += gridDim.x * threads) {
    words[i] = uint4{0, 0, 0, 0};
  }
}

template <int threads>
__device__ inline void clear_histogram(unsigned* histogram, int bins) {
  for (int bin = 4 * threadIdx.x; bin < bins; bin += 4 * threads) {
    *reinterpret_cast<uint4*>(histogram + bin) = uint4{0, 0, 0, 0};
  }
}

// A strided sample of the particles, of which the estimate needs the variances. Each of the block's
// first threads takes some rows of one dimension.
struct SmallSample {
  static constexpr int rows_per_thread = 16;
  int dim;    // dimensions looked at
  int width;  // threads side by side in a row
  int rows;
  float origin;
  float values[rows_per_thread];

  template <typename scalar>
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
    const auto* data = static_cast<const scalar*>(particles.data) + (column < dim ? column : 0);
    origin = to_accumulate(data[0]);
    const int64_t stride = step * particles.stride;
    data += row * stride;
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
      values[i] = row + i * together < rows ? to_accumulate(*data) : origin;
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

__device__ inline KeyRange window_around(float estimate) {
  const bool usable = estimate > 0 && __float_as_uint(estimate) < kInfinityKey;
  const unsigned key = usable ? __float_as_uint(estimate) : 0;
  return {key > kHalfWindow ? key - kHalfWindow : 0, kWindowShift, kWindowBins};
}

// Fills the block's histogram, zero before; with `window` bin 0 takes what lies below the range and
// the others move up by one. Ends in a barrier.
template <bool window, int size>
__device__ inline void count_keys(const SmallDistances<size>& distances, const KeyRange& range,
                                  unsigned* histogram) {
  constexpr int patch = SmallShape<size>::patch;
  const unsigned span = static_cast<unsigned>(range.bins - window) << range.shift;
  unsigned below = 0;
  unsigned nearest = ~0u;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      const unsigned key = __float_as_uint(distances.at[a][b]);
      if (window) below += key < range.low;
      nearest = min(nearest, key - range.low);
    }
  }
  // In the second pass on most data, few threads have anything to count.
  if (nearest < span) {
#pragma unroll
    for (int a = 0; a < patch; ++a) {
#pragma unroll
      for (int b = 0; b < patch; ++b) {
        const unsigned offset = __float_as_uint(distances.at[a][b]) - range.low;
        // Shared memory adds a warp's ones to one address at once, so ties cost nothing more.
        if (offset < span) atomicAdd(&histogram[(offset >> range.shift) + window], 1u);
      }
    }
  }
  if constexpr (window) {
    below = reduce_group(Sum<unsigned>{below}, kWarpSize, static_cast<Sum<unsigned>*>(nullptr))
                .value;
    if (threadIdx.x % kWarpSize == 0 && below != 0) atomicAdd(&histogram[0], below);
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

template <int threads>
__device__ inline void flush_histogram(const unsigned* histogram, int bins,
                                       SmallHistogram& result) {
#pragma unroll
  for (int first = 0; first < kSmallBins; first += 4 * threads) {
    const int bin = first + 4 * threadIdx.x;
    if (bin >= bins) break;
    const auto counts = load<4>(histogram + bin);
    const unsigned sum = counts.value[0] + counts.value[1] + counts.value[2] + counts.value[3];
    if (sum == 0) continue;
    for (int i = 0; i < 4; ++i) {
      if (counts.value[i] != 0) atomicAdd(&result.bins[bin + i], counts.value[i]);
    }
    atomicAdd(&result.groups[bin / kGroupBins], sum);
  }
}

struct RankPlace {
  unsigned bin;
  unsigned rank;  // within the bin
  bool found;     // whether the histogram reaches the rank at all
};

// Of 64 counts, two neighbours to a lane, the one that holds the rank. The same in all lanes.
__device__ inline RankPlace find_rank_among(uint2 counts, unsigned rank) {
  const int lane = threadIdx.x % kWarpSize;
  const unsigned sum = counts.x + counts.y;
  unsigned before = sum;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, before, offset);
    if (lane >= offset) before += other;
  }
  before -= sum;
  const unsigned holders =
      __ballot_sync(0xffffffffu, before <= rank && rank < before + sum);
  if (holders == 0) return {0, 0, false};
  const bool second = rank >= before + counts.x;
  const int holder = __ffs(holders) - 1;
  const unsigned bin = 2 * lane + second;
  const unsigned left = rank - before - (second ? counts.x : 0);
  return {__shfl_sync(0xffffffffu, bin, holder), __shfl_sync(0xffffffffu, left, holder), true};
}

// The bin of a complete histogram that holds the rank, found by one warp.
__device__ inline RankPlace find_rank(const SmallHistogram& histogram, unsigned rank) {
  const int lane = threadIdx.x % kWarpSize;
  const auto load_pair = [&](const unsigned* counts) {
    return __ldcg(reinterpret_cast<const uint2*>(counts) + lane);
  };
  const RankPlace group = find_rank_among(load_pair(histogram.groups), rank);
  if (!group.found) return group;
  RankPlace place =
      find_rank_among(load_pair(histogram.bins + kGroupBins * group.bin), group.rank);
  place.bin += kGroupBins * group.bin;
  return place;
}

// The same in all threads of the block.
__device__ inline RankPlace find_rank(const SmallHistogram& histogram, unsigned rank,
                                      SmallSelectShared& shared) {
  if (threadIdx.x < kWarpSize) {
    const RankPlace place = find_rank(histogram, rank);
    if (threadIdx.x == 0) {
      shared.bin = place.bin;
      shared.rank = place.rank;
      shared.total = place.found;
    }
  }
  __syncthreads();
  const RankPlace place{shared.bin, shared.rank, shared.total != 0};
  __syncthreads();
  return place;
}

// The same for the window, which the block's first threads read at once.
__device__ inline RankPlace find_window_rank(const unsigned* window, unsigned rank,
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

// The smallest distance above `key`, over the grid.
template <int size>
__device__ inline float next_above(const SmallDistances<size>& distances, unsigned key,
                                   SmallMedianScratch* scratch) {
  constexpr int patch = SmallShape<size>::patch;
  unsigned complement = 0;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      const unsigned other = __float_as_uint(distances.at[a][b]);
      if (other > key && other <= kInfinityKey && ~other > complement) complement = ~other;
    }
  }
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, complement, offset);
    complement = other > complement ? other : complement;
  }
  if (threadIdx.x % kWarpSize == 0) atomicMax(&scratch->next_above, complement);
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
  RankPlace place = find_window_rank(scratch->window, rank, shared);
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
    count_keys<false>(distances, range, shared.histogram);
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
  const RankPlace next = find_rank(scratch->histograms[pass], rank + 1, shared);
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
