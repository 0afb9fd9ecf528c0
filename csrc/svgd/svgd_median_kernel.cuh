// SPDX-License-Identifier: BSD-3-Clause
// The exact median of the squared distances, without sorting them.
//
// A non-negative float orders as its bits do, so the value of a given rank among the pairs i < j is
// found digit by digit: each pass counts, in a histogram of 2^11 bins, the pairs whose leading bits
// are those found so far, and its last block to finish picks the bin that holds the rank. Three
// passes settle float32, six float64. Counts are added by integer atomics, whose order does not
// matter, so the result repeats bit for bit. Where the passes count a share of the pairs, they
// settle nothing: that is done once the shares are added (svgd_share_kernel.cuh).
//
// svgd_count       one digit; the first pass also adds the distances, for the mean
// svgd_next_above  the smallest value above the one found, where the median is a mean of two

#pragma once

#include <cstring>

#include "common/device/reduce.cuh"
#include "svgd/svgd_distances.cuh"
#include "svgd/svgd_formula.h"

namespace fused_ops {

constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr int kThreadBins = kBins / kTileThreads;  // of a thread
constexpr int kMaxDigits = 6;
// Tiles whose counts a block adds up in 32 bits before it hands them on: 2^16 * 64^2 = 2^28 pairs.
constexpr int kTilesPerFlush = 1 << 16;

using Count = unsigned long long;

template <typename T>
struct DistanceKey;
template <>
struct DistanceKey<float> {
  using type = unsigned;
  static constexpr int digits = 3;
  static __device__ type of(float value) { return __float_as_uint(value); }
  static __device__ float value(type key) { return __uint_as_float(key); }
};
template <>
struct DistanceKey<double> {
  using type = unsigned long long;
  static constexpr int digits = 6;
  static __device__ type of(double value) { return __double_as_longlong(value); }
  static __device__ double value(type key) { return __longlong_as_double(key); }
};

// The bits below the sign are cut into digits from the top; the last one may be shorter.
template <typename T>
__device__ inline int digit_shift(int digit) {
  const int shift = static_cast<int>(sizeof(T)) * 8 - 1 - kDigitBits * (digit + 1);
  return shift > 0 ? shift : 0;
}

template <typename T>
__device__ inline int digit_bits(int digit) {
  const int left = static_cast<int>(sizeof(T)) * 8 - 1 - kDigitBits * digit;
  return left < kDigitBits ? left : kDigitBits;
}

// What the passes leave to each other in device memory, all zero at first.
struct alignas(16) MedianScratch {
  Count histograms[kMaxDigits][kBins];
  Count prefix;                       // the leading bits of the wanted value
  Count rank;                         // its rank among the pairs that share them
  Count equal;                        // how many those are
  Count next_above;                   // complement of the smallest key above the value
  unsigned finished[kMaxDigits + 1];  // blocks of each pass
  unsigned nan;                       // whether any distance is NaN
};

struct MedianTask {
  SvgdParticles particles;
  void* distances;  // (count, count), filled by the first pass, or null: then each pass computes
  MedianScratch* scratch;
  double* partial_sums;  // of the distances, by the first_blocks blocks of the first pass
  int first_blocks;
  BandwidthRule rule;
  MedianRanks ranks;
  int64_t rank;                      // of the value sought, among the pairs i < j
  void* bandwidth;                   // the result, one element of the accumulation type
  const unsigned* wanted = nullptr;  // if not null, the passes do nothing where it is zero
  PairShare share;
  bool shared = false;  // whether `share` is to be added to others before a digit is settled
};

// Whether this block is the last of its grid to come here; it then sees what the others wrote.
__device__ inline bool is_last_block(unsigned* finished) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(finished, 1u) == gridDim.x - 1;
  __syncthreads();
  __threadfence();
  return last;
}

// The tile of pairs i <= j that `index` counts along the rows of the lower triangle.
__device__ inline void triangle_tile(int64_t index, int64_t& row, int64_t& column) {
  // float32 may be off by a row, which the loops put right.
  row = static_cast<int64_t>((sqrtf(8.0f * static_cast<float>(index) + 1.0f) - 1.0f) * 0.5f);
  while (row * (row + 1) / 2 > index) --row;
  while ((row + 1) * (row + 2) / 2 <= index) ++row;
  column = index - row * (row + 1) / 2;
}

// Calls `visit(row, column)` for this block's tiles of a share of the pairs i <= j, `tile`
// particles a side.
template <typename Visit>
__device__ inline void for_each_triangle_tile(int64_t count, int64_t tile, const PairShare& share,
                                              Visit visit) {
  const int64_t edge = (count + tile - 1) / tile;
  const int64_t tiles = edge * (edge + 1) / 2;
  const int64_t step = int64_t{gridDim.x} * share.count;
  for (int64_t index = int64_t{blockIdx.x} * share.count + share.index; index < tiles;
       index += step) {
    int64_t row, column;
    triangle_tile(index, row, column);
    visit(row, column);
  }
}

struct RankPlace {
  unsigned bin;
  Count rank;   // within the bin
  Count count;  // of the bin
  bool found;   // whether the histogram reaches the rank at all
};

// This thread's bins of a histogram that other blocks wrote.
template <typename Bin>
__device__ inline void load_bins(const Bin* histogram, Bin (&bins)[kThreadBins]) {
  constexpr int together = sizeof(uint4) / sizeof(Bin);
  const auto* source = reinterpret_cast<const uint4*>(histogram + threadIdx.x * kThreadBins);
#pragma unroll
  for (int part = 0; part < kThreadBins / together; ++part) {
    const uint4 loaded = __ldcg(source + part);
    memcpy(bins + part * together, &loaded, sizeof(loaded));
  }
}

// The bins of complete histograms in device memory that hold `wanted` ranks: of histogram
// `histograms[index]` for rank `ranks[index]`. All threads of the block call it and get the same.
template <int wanted, typename Bin>
__device__ inline void find_ranks(const Bin* const (&histograms)[wanted],
                                  const Count (&ranks)[wanted], RankPlace (&places)[wanted]) {
  constexpr int warps = kTileThreads / kWarpSize;
  __shared__ Bin warp_sums[wanted][warps];
  __shared__ RankPlace found[wanted];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  Bin counts[wanted][kThreadBins];
  Bin sums[wanted];
  Bin before[wanted];  // becomes the sum of all bins before this thread's
  __syncthreads();     // until the last call's places are read
#pragma unroll
  for (int index = 0; index < wanted; ++index) {
    load_bins(histograms[index], counts[index]);
    sums[index] = 0;
#pragma unroll
    for (int bin = 0; bin < kThreadBins; ++bin) sums[index] += counts[index][bin];
    before[index] = sums[index];
    if (threadIdx.x == 0) found[index].found = false;
  }
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
#pragma unroll
    for (int index = 0; index < wanted; ++index) {
      const Bin other = __shfl_up_sync(0xffffffffu, before[index], offset);
      if (lane >= offset) before[index] += other;
    }
  }
#pragma unroll
  for (int index = 0; index < wanted; ++index) {
    if (lane == kWarpSize - 1) warp_sums[index][warp] = before[index];
  }
  __syncthreads();
#pragma unroll
  for (int index = 0; index < wanted; ++index) {
    for (int other = 0; other < warp; ++other) before[index] += warp_sums[index][other];
    before[index] -= sums[index];
    const Count rank = ranks[index];
    if (before[index] > rank || rank >= before[index] + sums[index]) continue;
    bool settled = false;
#pragma unroll
    for (int bin = 0; bin < kThreadBins; ++bin) {
      if (!settled && rank < before[index] + counts[index][bin]) {
        settled = true;
        found[index] = {threadIdx.x * kThreadBins + bin, rank - before[index], counts[index][bin],
                        true};
      }
      before[index] += counts[index][bin];
    }
  }
  __syncthreads();
#pragma unroll
  for (int index = 0; index < wanted; ++index) places[index] = found[index];
}

__device__ inline RankPlace find_rank(const Count* histogram, Count rank) {
  RankPlace places[1];
  find_ranks<1>({histogram}, {rank}, places);
  return places[0];
}

// Adds a block's histogram in shared memory to one in device memory.
template <typename Bin>
__device__ inline void flush_histogram(const unsigned* histogram, Bin* result) {
  for (int bin = threadIdx.x; bin < kBins; bin += kTileThreads) {
    if (histogram[bin] != 0) atomicAdd(&result[bin], Bin{histogram[bin]});
  }
}

// Finds the bin of `digit` that holds `rank` and writes it down. One block does so.
template <typename T>
__device__ inline void pick_digit(MedianScratch& scratch, int digit, Count rank) {
  const Count prefix = scratch.prefix;
  // NaN may leave too few pairs for the rank; the median is NaN then.
  const RankPlace place = find_rank(scratch.histograms[digit], rank);
  if (threadIdx.x == 0 && place.found) {
    scratch.prefix = prefix << digit_bits<T>(digit) | place.bin;
    scratch.rank = place.rank;
    scratch.equal = place.count;
  }
  __syncthreads();
}

// The sum of what blocks left, in every thread of the block.
__device__ inline double sum_of_blocks(const double* sums, int blocks) {
  __shared__ Sum<double> shared[kTileThreads / kWarpSize];
  Sum<double> sum;
  for (int block = threadIdx.x; block < blocks; block += kTileThreads) sum.value += sums[block];
  return reduce_group(sum, kTileThreads, shared).value;
}

// The bandwidth from the value found. One block does so.
template <typename T>
__device__ inline void finish_median(const MedianTask& task) {
  using Key = DistanceKey<T>;
  const MedianScratch& scratch = *task.scratch;
  const T value = Key::value(static_cast<typename Key::type>(scratch.prefix));
  T lower = task.ranks.lower < 0 ? T(0) : value;
  T upper = task.ranks.upper < 0 ? T(0) : value;
  // Found by the lower rank; the upper one is the next pair's, which may be equal.
  if (mean_of_two(task.ranks) && scratch.rank + 1 >= scratch.equal) {
    upper = Key::value(static_cast<typename Key::type>(~__ldcg(&scratch.next_above)));
  }
  double sum = 0;
  if (upper == T(0)) sum = sum_of_blocks(task.partial_sums, task.first_blocks);
  if (threadIdx.x != 0) return;
  if (scratch.nan) lower = upper = std::numeric_limits<T>::quiet_NaN();
  const double count = static_cast<double>(task.particles.count);
  *static_cast<T*>(task.bandwidth) = bandwidth_of<T>(task.rule, task.particles.count, lower, upper,
                                                     sum / (count * (count - 1) / 2));
}

// Calls `visit(d2, is a pair i < j)` for the pairs of this block's tiles of 16 patches a side, and
// `after()` after each tile. Where the distances are kept, the first pass stores them.
template <typename T, int patch, typename Visit, typename After>
__device__ inline void for_each_pair(const MedianTask& task, bool first_pass, Visit visit,
                                     After after) {
  constexpr int tile = 16 * patch;
  __shared__ CoordinateTile<T, tile> tile_i, tile_j;
  for_each_triangle_tile(task.particles.count, tile, task.share, [&](int64_t row, int64_t column) {
    T distances[patch][patch];
    T* matrix = static_cast<T*>(task.distances);
    if (matrix != nullptr && !first_pass) {
      stored_distances(matrix, task.particles.count, column * tile, row * tile, distances);
    } else {
      tile_distances(task.particles, column * tile, row * tile, tile_i, tile_j, distances);
      if (matrix != nullptr) {
        store_distances(matrix, task.particles.count, column * tile, row * tile, distances, false);
      }
    }
    const int64_t i = column * tile + patch * (threadIdx.x / 16);
    const int64_t j = row * tile + patch * (threadIdx.x % 16);
#pragma unroll
    for (int a = 0; a < patch; ++a) {
#pragma unroll
      for (int b = 0; b < patch; ++b) {
        visit(distances[a][b], i + a < j + b && j + b < task.particles.count);
      }
    }
    after();
  });
}

template <typename T, int patch>
__global__ void __launch_bounds__(kTileThreads)
    svgd_count(const __grid_constant__ MedianTask task, int digit) {
  using Key = DistanceKey<T>;
  __shared__ unsigned histogram[kBins];
  if (task.wanted != nullptr && *task.wanted == 0) return;
  MedianScratch& scratch = *task.scratch;
  const Count prefix = scratch.prefix;
  const int shift = digit_shift<T>(digit);
  const int bits = digit_bits<T>(digit);
  const auto flush = [&] {
    __syncthreads();
    flush_histogram(histogram, scratch.histograms[digit]);
  };
  const auto clear = [&] {
    for (int bin = threadIdx.x; bin < kBins; bin += kTileThreads) histogram[bin] = 0;
    __syncthreads();
  };
  clear();
  double sum = 0;
  bool nan = false;
  int tiles = 0;
  for_each_pair<T, patch>(
      task, digit == 0,
      [&](T distance, bool counts) {
        if (distance != distance) {  // its bits would not order
          nan |= counts;
          counts = false;
        }
        if (digit == 0 && counts) sum += distance;
        const Count key = Key::of(distance);
        counts &= (key >> shift >> bits) == prefix;
        const int bin = static_cast<int>(key >> shift) & ((1 << bits) - 1);
        // Ties put a whole warp into one bin, which one addition serves.
        const unsigned wanting = __ballot_sync(0xffffffffu, counts);
        if (wanting == 0) return;
        const int leader = __ffs(wanting) - 1;
        const int first_bin = __shfl_sync(0xffffffffu, bin, leader);
        if (__all_sync(0xffffffffu, !counts || bin == first_bin)) {
          if (threadIdx.x % kWarpSize == leader) atomicAdd(&histogram[bin], __popc(wanting));
        } else if (counts) {
          atomicAdd(&histogram[bin], 1u);
        }
      },
      [&] {
        if (++tiles % kTilesPerFlush != 0) return;
        flush();
        clear();
      });
  flush();
  if (digit == 0) {
    if (nan) scratch.nan = 1;  // every writer writes the same
    __shared__ Sum<double> shared[kTileThreads / kWarpSize];
    const Sum<double> total = reduce_group(Sum<double>{sum}, kTileThreads, shared);
    if (threadIdx.x == 0) task.partial_sums[blockIdx.x] = total.value;
  }
  if (task.shared || !is_last_block(&scratch.finished[digit])) return;
  pick_digit<T>(scratch, digit, digit == 0 ? static_cast<Count>(task.rank) : scratch.rank);
  if (digit == Key::digits - 1 && !mean_of_two(task.ranks)) finish_median<T>(task);
}

template <typename T, int patch>
__global__ void __launch_bounds__(kTileThreads)
    svgd_next_above(const __grid_constant__ MedianTask task) {
  using Key = DistanceKey<T>;
  if (task.wanted != nullptr && *task.wanted == 0) return;
  MedianScratch& scratch = *task.scratch;
  const Count value = scratch.prefix;
  Count complement = 0;
  for_each_pair<T, patch>(
      task, false,
      [&](T distance, bool counts) {
        const Count key = Key::of(distance);
        if (counts && distance == distance && key > value && ~key > complement) complement = ~key;
      },
      [] {});
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const Count other = __shfl_xor_sync(0xffffffffu, complement, offset);
    complement = other > complement ? other : complement;
  }
  if (threadIdx.x % kWarpSize == 0) atomicMax(&scratch.next_above, complement);
  if (!task.shared && is_last_block(&scratch.finished[Key::digits])) finish_median<T>(task);
}

}  // namespace fused_ops
