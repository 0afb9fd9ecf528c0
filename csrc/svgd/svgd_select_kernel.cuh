// SPDX-License-Identifier: BSD-3-Clause
// The wanted ranks of the list that a counting kernel left, and from them the bandwidth
// (svgd_bracket.cuh). One cooperative launch.
//
// Each pass counts the keys of a range in equal bins and, in bin 0, all below; the range narrows to
// the bin of the wanted rank until bins hold one key. Distances from products are off by up to e,
// so the wanted distance is within e of the one that has its rank among them. After the first pass
// those within 2e are formed again from direct differences, in their places on the list. That puts
// no other on a wrong side of the wanted one.

#pragma once

#include <cooperative_groups.h>

#include "svgd/svgd_bracket.cuh"

namespace fused_ops {

struct SelectRange {
  unsigned low;
  int shift;  // bins are 2^shift keys wide

  // `high` is included. The first bin counts what lies below.
  __device__ static SelectRange between(unsigned low, unsigned high) {
    int shift = 0;
    while ((high - low) >> shift >= kBins - 1) ++shift;
    return {low, shift};
  }
  __device__ unsigned first_key(unsigned bin) const { return low + ((bin - 1) << shift); }
  __device__ unsigned last_key(unsigned bin) const { return first_key(bin) + (1u << shift) - 1; }
};

// Distances that are to be formed again: keys of [low, high].
struct DoubtfulRange {
  unsigned low = 1;
  unsigned high = 0;  // none
  __device__ bool has(unsigned key) const { return low <= key && key <= high; }
};

// Calls `visit` for this thread's keys.
template <typename Visit>
__device__ inline void for_each_listed(const BracketTask& task, int64_t size,
                                       const DoubtfulRange& doubtful, WarpDifferences& differences,
                                       Visit visit) {
  const int64_t step = int64_t{gridDim.x} * kTileThreads;
  const int64_t first = int64_t{blockIdx.x} * kTileThreads + threadIdx.x;
  for (int64_t at = first; at - threadIdx.x % kWarpSize < size; at += step) {
    unsigned key = at < size ? task.list[at] : kNoKey;
    const unsigned wanted = __ballot_sync(0xffffffffu, doubtful.has(key));
    if (wanted != 0) {
      const int2 pair = doubtful.has(key) ? task.pairs[at] : int2{0, 0};
      const float distance = warp_distances(task.particles, wanted, pair.x, pair.y, differences);
      if (doubtful.has(key)) {
        key = __float_as_uint(distance);
        task.list[at] = key;
      }
    }
    visit(key);
  }
}

// A histogram of the list in device memory, complete after the barrier in it.
__device__ inline void count_listed(const BracketTask& task, int64_t size, bool with_ties,
                                    const SelectRange& range, const DoubtfulRange& doubtful,
                                    WarpDifferences& differences, unsigned* histogram,
                                    unsigned* result) {
  for (int bin = threadIdx.x; bin < kBins; bin += kTileThreads) histogram[bin] = 0;
  __syncthreads();
  const auto bin_of = [&](unsigned key) {
    return key < range.low ? 0u : min(((key - range.low) >> range.shift) + 1, unsigned{kBins});
  };
  for_each_listed(task, size, doubtful, differences, [&](unsigned key) {
    const unsigned bin = bin_of(key);
    if (bin < kBins) atomicAdd(&histogram[bin], 1u);
  });
  if (with_ties && blockIdx.x == 0 && threadIdx.x < kBracket) {
    const unsigned bin = bin_of(task.state->bracket[threadIdx.x]);
    const auto count = static_cast<unsigned>(task.state->equal[threadIdx.x]);
    if (bin < kBins && count != 0) atomicAdd(&histogram[bin], count);
  }
  __syncthreads();
  flush_histogram(histogram, result);
  cooperative_groups::this_grid().sync();
}

// The smallest key above `key` on the list and, with ties, in the bracket.
__device__ inline unsigned key_above(const BracketTask& task, int64_t size, bool with_ties,
                                     unsigned key, WarpDifferences& differences) {
  Maximum complement;
  const auto merge = [&](unsigned other) {
    if (other > key && other <= kInfinityKey) complement.merge({~other});
  };
  for_each_listed(task, size, {}, differences, merge);
  if (with_ties) {
#pragma unroll
    for (int index = 0; index < kBracket; ++index) {
      if (task.state->equal[index] != 0) merge(task.state->bracket[index]);
    }
  }
  complement = reduce_group<Maximum>(complement, kWarpSize, nullptr);
  if (threadIdx.x % kWarpSize == 0) atomicMax(&task.state->next_above, complement.bits);
  cooperative_groups::this_grid().sync();
  return ~__ldcg(&task.state->next_above);
}

// By the first block: the bandwidth from the keys of the two middle distances.
__device__ inline void write_bandwidth(const BracketTask& task, unsigned lower, unsigned upper) {
  __shared__ Sum<double> shared[kTileThreads / kWarpSize];
  Sum<double> sum;
  if (upper == 0) {  // the same for every thread
    for (int block = threadIdx.x; block < task.direct_blocks; block += kTileThreads) {
      sum.value += task.partial_sums[block];
    }
    sum = reduce_group(sum, kTileThreads, shared);
  }
  const double count = static_cast<double>(task.particles.count);
  if (threadIdx.x != 0) return;
  *task.bandwidth =
      bandwidth_of<float>(task.rule, task.particles.count, __uint_as_float(lower),
                          __uint_as_float(upper), sum.value / (count * (count - 1) / 2));
}

// The first pass over distances from products: narrows `range` to where the wanted ones are, and
// tells which are doubtful. False where the bracket ends too near for that.
__device__ inline bool settle_products(const BracketTask& task, const RankPlace& lower,
                                       const RankPlace& upper, SelectRange& range,
                                       DoubtfulRange& doubtful) {
  const BracketState& state = *task.state;
  const float unscale = 1 / task.split.scale[0] / task.split.scale[0];
  const float high = state.low + state.width;
  // Also what the stack's 27 bits dropped, and the roundings around the list.
  const float error = (state.error + 0x1p-18f * state.width + 0x1p-22f * high) * unscale;
  const float first = __uint_as_float(range.first_key(lower.bin));
  const float last = __uint_as_float(range.last_key(upper.bin));
  if (first - 2 * error < state.low * unscale || last + 2 * error > high * unscale) return false;
  const auto key = [](float distance) { return __float_as_uint(fmaxf(distance, 0.0f)); };
  doubtful = {key(first - 2 * error), key(last + 2 * error)};
  range = SelectRange::between(key(first - error), key(last + error));
  return true;
}

static __global__ void __launch_bounds__(kTileThreads)
    svgd_select(const __grid_constant__ BracketTask task) {
  __shared__ unsigned histogram[kBins];
  __shared__ WarpDifferences all_differences[kTileThreads / kWarpSize];
  WarpDifferences& differences = all_differences[threadIdx.x / kWarpSize];
  BracketState& state = *task.state;
  const bool direct = wants_direct_count(task);
  const PairCounts counts = direct ? state.direct : state.products;
  const auto lower_rank = static_cast<Count>(task.ranks.lower);
  const bool two = task.ranks.upper > task.ranks.lower;
  const bool first_block = blockIdx.x == 0;
  if (direct && state.nan != 0) {
    constexpr unsigned not_a_number = 0x7fffffff;
    if (first_block) write_bandwidth(task, not_a_number, not_a_number);
    return;
  }
  const auto miss = [&] {
    if (first_block && threadIdx.x == 0) state.missed = 1;
  };
  if (lower_rank < counts.below || counts.listed > static_cast<Count>(task.capacity)) return miss();
  const auto rank = static_cast<unsigned>(lower_rank - counts.below);
  const auto size = static_cast<int64_t>(counts.listed);
  SelectRange range = SelectRange::between(state.bracket[0], state.bracket[kBracket - 1]);
  DoubtfulRange doubtful;
  int pass = 0;
  const auto count = [&] {
    count_listed(task, size, direct, range, doubtful, differences, histogram,
                 state.histograms[pass]);
    return find_rank(state.histograms[pass++], rank);
  };
  if (!direct) {
    const float unscale = 1 / task.split.scale[0] / task.split.scale[0];
    range = SelectRange::between(__float_as_uint(fmaxf(state.low * unscale, 0.0f)),
                                 __float_as_uint((state.low + state.width) * unscale));
    const RankPlace lower = count();
    const RankPlace upper = two ? find_rank(state.histograms[pass - 1], rank + 1) : lower;
    if (!lower.found || !upper.found || !settle_products(task, lower, upper, range, doubtful)) {
      return miss();
    }
  }
  RankPlace place = count();
  doubtful = {};
  while (place.found && place.bin != 0 && range.shift != 0) {
    range = SelectRange::between(range.first_key(place.bin), range.last_key(place.bin));
    place = count();
  }
  if (!place.found || place.bin == 0) return miss();
  const unsigned lower = range.first_key(place.bin);
  unsigned upper = lower;
  if (two && place.rank + 1 == place.count) {
    const RankPlace next = find_rank(state.histograms[pass - 1], rank + 1);
    upper =
        next.found ? range.first_key(next.bin) : key_above(task, size, direct, lower, differences);
  }
  if (first_block) write_bandwidth(task, lower, upper);
}

}  // namespace fused_ops
