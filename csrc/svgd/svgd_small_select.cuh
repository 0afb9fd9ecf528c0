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
constexpr int kWindowBins = 1024;  // the first counts all keys below the window
constexpr int kWindowShift = 12;   // half an octave: 2^22 keys
static_assert(1 << kWindowShift == kSmallBins);
constexpr unsigned kHalfWindow = (kWindowBins / 2) << kWindowShift;
constexpr int kSmallPasses = 5;  // the window, its bin; or three digits
constexpr unsigned kInfinityKey = 0x7f800000u;

// In device memory, zero at first.
struct alignas(16) SmallMedianScratch {
  unsigned histograms[kSmallPasses][kSmallBins];
  unsigned next_above;  // complement of the smallest key above the one found
  unsigned nan;         // whether any distance is NaN
  unsigned unused[2];
};
static_assert(sizeof(SmallMedianScratch) % 16 == 0);

struct SmallSelectShared {
  alignas(16) unsigned window[kWindowBins];
  alignas(16) unsigned histogram[kSmallBins];
  unsigned warp_sums[kTileThreads / kWarpSize];
  unsigned bin, rank;
  float columns[2][kTileThreads];
  Sum<double> sums[kTileThreads / kWarpSize];
};

struct KeyRange {
  unsigned low;
  int shift;  // bins are 2^shift keys wide
  int bins;   // a multiple of 1024, or 128
};

// The grid's blocks share the work. A barrier must follow.
__device__ inline void clear_scratch(SmallMedianScratch* scratch) {
  auto* words = reinterpret_cast<uint4*>(scratch);
  constexpr int size = sizeof(SmallMedianScratch) / sizeof(uint4);
  for (int i = blockIdx.x * kTileThreads + threadIdx.x; i < size; i += gridDim.x * kTileThreads) {
    words[i] = uint4{0, 0, 0, 0};
  }
}

__device__ inline void clear_histogram(unsigned* histogram, int bins) {
  for (int bin = 4 * threadIdx.x; bin < bins; bin += 4 * kTileThreads) {
    *reinterpret_cast<uint4*>(histogram + bin) = uint4{0, 0, 0, 0};
  }
}

// A strided sample of the particles, of which the estimate needs the variances. A thread takes
// some rows of one dimension.
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
    dim = particles.dim < kTileThreads ? static_cast<int>(particles.dim) : kTileThreads;
    width = 1;
    while (width < dim) width *= 2;
    const int wanted = rows_per_thread * (kTileThreads / width);
    const int step = count > wanted ? count / wanted : 1;
    rows = count < wanted ? count : wanted;
    const int column = threadIdx.x % width;
    const auto* data = static_cast<const scalar*>(particles.data) + (column < dim ? column : 0);
    origin = to_accumulate(data[0]);
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
      const int row = threadIdx.x / width + i * (kTileThreads / width);
      values[i] = row < rows ? to_accumulate(data[int64_t{row} * step * particles.stride]) : origin;
    }
  }

  __device__ int lanes() const { return width < kWarpSize ? width : kWarpSize; }

  // Leaves the warps' sums in `columns`. A barrier must follow.
  __device__ void sum(float (&columns)[2][kTileThreads]) const {
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
                                        const float (&columns)[2][kTileThreads]) {
  const auto rows = static_cast<float>(sample.rows);
  Sum<float> variance, power;
  for (int column = threadIdx.x % kWarpSize; column < sample.dim; column += kWarpSize) {
    float total = 0;
    float squares = 0;
    for (int i = column; i < kTileThreads / kWarpSize * sample.lanes(); i += sample.width) {
      total += columns[0][i];
      squares += columns[1][i];
    }
    const float mean = total / rows;
    const float one = squares / rows - mean * mean;
    variance.value += one;
    power.value = fma(one, one, power.value);
  }
  variance = reduce_group<Sum<float>>(variance, kWarpSize, nullptr);
  power = reduce_group<Sum<float>>(power, kWarpSize, nullptr);
  const float freedom = variance.value * variance.value / power.value;
  const float below = 1.0f - 2.0f / (9.0f * freedom);
  const float unbiased = rows / (rows > 1 ? rows - 1 : 1);
  return 2.0f * variance.value * unbiased * below * below * below * static_cast<float>(all_dims) /
         static_cast<float>(sample.dim);
}

__device__ inline KeyRange window_around(float estimate) {
  const bool usable = estimate > 0 && __float_as_uint(estimate) < kInfinityKey;
  const unsigned key = usable ? __float_as_uint(estimate) : 0;
  return {key > kHalfWindow ? key - kHalfWindow : 0, kWindowShift, kWindowBins};
}

// Fills the block's histogram, zero before; with `window` bin 0 takes what lies below the range and
// the others move up by one. Ends in a barrier.
template <bool window, int patch>
__device__ inline void count_keys(const float (&distances)[patch][patch], const KeyRange& range,
                                  unsigned* histogram) {
  unsigned below = 0;
  const unsigned span = static_cast<unsigned>(range.bins - window) << range.shift;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      const unsigned key = __float_as_uint(distances[a][b]);
      const unsigned offset = key - range.low;
      // Shared memory adds a warp's ones to one address at once, so ties cost nothing more.
      if (offset < span) atomicAdd(&histogram[(offset >> range.shift) + window], 1u);
      if (window && key < range.low) ++below;
    }
  }
  if constexpr (window) {
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      below += __shfl_xor_sync(0xffffffffu, below, offset);
    }
    if (threadIdx.x % kWarpSize == 0 && below != 0) atomicAdd(&histogram[0], below);
  }
  __syncthreads();
}

__device__ inline void flush_histogram(const unsigned* histogram, int bins, unsigned* result) {
  for (int bin = threadIdx.x; bin < bins; bin += kTileThreads) {
    if (histogram[bin] != 0) atomicAdd(&result[bin], histogram[bin]);
  }
}

struct RankPlace {
  unsigned bin;
  unsigned rank;  // within the bin
  bool found;     // whether the histogram reaches the rank at all
};

template <int per_thread>
__device__ inline RankPlace find_rank_of(const unsigned* histogram, unsigned rank,
                                         SmallSelectShared& shared) {
  static_assert(per_thread % 4 == 0);
  unsigned counts[per_thread];
  unsigned sum = 0;
#pragma unroll
  for (int bin = 0; bin < per_thread; bin += 4) {
    const uint4 four =
        __ldcg(reinterpret_cast<const uint4*>(histogram + threadIdx.x * per_thread + bin));
    counts[bin] = four.x;
    counts[bin + 1] = four.y;
    counts[bin + 2] = four.z;
    counts[bin + 3] = four.w;
    sum += four.x + four.y + four.z + four.w;
  }
  unsigned before = sum;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, before, offset);
    if (lane >= offset) before += other;
  }
  if (lane == kWarpSize - 1) shared.warp_sums[warp] = before;
  __syncthreads();
  unsigned total = 0;
#pragma unroll
  for (int other = 0; other < kTileThreads / kWarpSize; ++other) {
    const unsigned warp_sum = shared.warp_sums[other];
    if (other < warp) before += warp_sum;
    total += warp_sum;
  }
  before -= sum;
  if (before <= rank && rank < before + sum) {
    unsigned bin = 0;
#pragma unroll
    for (int next = 0; next < per_thread - 1; ++next) {
      if (bin == next && rank >= before + counts[next]) {
        before += counts[next];
        bin = next + 1;
      }
    }
    shared.bin = threadIdx.x * per_thread + bin;
    shared.rank = rank - before;
  }
  __syncthreads();
  return {shared.bin, shared.rank, rank < total};
}

// The bin of a complete histogram that holds the rank, the same in all blocks.
__device__ inline RankPlace find_rank(const unsigned* histogram, int bins, unsigned rank,
                                      SmallSelectShared& shared) {
  return bins <= kWindowBins ? find_rank_of<kWindowBins / kTileThreads>(histogram, rank, shared)
                             : find_rank_of<kSmallBins / kTileThreads>(histogram, rank, shared);
}

// The smallest distance above `key`, over the grid.
template <int patch>
__device__ inline float next_above(const float (&distances)[patch][patch], unsigned key,
                                   SmallMedianScratch* scratch) {
  unsigned complement = 0;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      const unsigned other = __float_as_uint(distances[a][b]);
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
template <int patch>
__device__ inline MiddleDistances select_distances(const float (&distances)[patch][patch],
                                                   KeyRange range, unsigned rank, bool mean_of_two,
                                                   GridToken waiting, SmallMedianScratch* scratch,
                                                   SmallSelectShared& shared) {
  const auto grid = cooperative_groups::this_grid();
  bool nan = false;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) nan |= distances[a][b] != distances[a][b];
  }
  grid.barrier_wait(std::move(waiting));
  flush_histogram(shared.window, range.bins, scratch->histograms[0]);
  if (nan) scratch->nan = 1;  // every writer writes the same
  grid.sync();
  const unsigned any_nan = __ldcg(&scratch->nan);  // on its way while the rank is looked for
  RankPlace place = find_rank(scratch->histograms[0], range.bins, rank, shared);
  const float not_a_number = std::numeric_limits<float>::quiet_NaN();
  if (any_nan != 0) return {not_a_number, not_a_number};
  int pass = 1;
  if (place.found && place.bin > 0) {
    range = {range.low + ((place.bin - 1) << range.shift), 0, kSmallBins};
    rank = place.rank;
  } else {
    range = {0, 19, kSmallBins};
    pass = 2;
  }
  while (true) {
    count_keys<false>(distances, range, shared.histogram);
    flush_histogram(shared.histogram, range.bins, scratch->histograms[pass]);
    grid.sync();
    place = find_rank(scratch->histograms[pass], range.bins, rank, shared);
    if (range.shift == 0) break;
    clear_histogram(shared.histogram, kSmallBins);
    __syncthreads();
    const unsigned low = range.low + (place.bin << range.shift);
    range = range.shift == 19 ? KeyRange{low, 7, kSmallBins} : KeyRange{low, 0, 128};
    rank = place.rank;
    ++pass;
  }
  const unsigned key = range.low + place.bin;
  const float lower = __uint_as_float(key);
  if (!mean_of_two) return {lower, lower};
  const RankPlace next = find_rank(scratch->histograms[pass], range.bins, rank + 1, shared);
  return {lower,
          next.found ? __uint_as_float(range.low + next.bin) : next_above(distances, key, scratch)};
}

// The mean distance of the pairs, NaN included, by a sum in a fixed order. `partial` holds a number
// per block.
template <int patch>
__device__ inline double mean_distance(const float (&distances)[patch][patch], int64_t count,
                                       double* partial, SmallSelectShared& shared) {
  Sum<double> sum;
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      if (!(distances[a][b] < 0)) sum.value += distances[a][b];
    }
  }
  sum = reduce_group(sum, kTileThreads, shared.sums);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum.value;
  cooperative_groups::this_grid().sync();
  Sum<double> total;
  for (int block = threadIdx.x; block < gridDim.x; block += kTileThreads) {
    total.value += __ldcg(&partial[block]);
  }
  total = reduce_group(total, kTileThreads, shared.sums);
  return total.value / (static_cast<double>(count) * static_cast<double>(count - 1) / 2);
}

}  // namespace fused_ops
