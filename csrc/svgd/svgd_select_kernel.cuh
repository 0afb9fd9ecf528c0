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

#include "svgd/svgd_list.cuh"

namespace fused_ops {

// The smallest key above `key` on the list and, with ties, in the bracket.
__device__ inline unsigned key_above(const BracketTask& task, int64_t size, bool with_ties,
                                     unsigned key, WarpDifferences& differences) {
  const Maximum complement = warp_key_above(task, size, with_ties, key, differences);
  if (threadIdx.x % kWarpSize == 0) atomicMax(&task.state->next_above, complement.bits);
  cooperative_groups::this_grid().sync();
  return ~__ldcg(&task.state->next_above);
}

// By the first block: the bandwidth from the keys of the two middle distances.
__device__ inline void write_bandwidth(const BracketTask& task, unsigned lower, unsigned upper) {
  double sum = 0;
  if (upper == 0) sum = sum_of_blocks(task.partial_sums, task.direct_blocks);
  const double count = static_cast<double>(task.particles.count);
  if (threadIdx.x != 0) return;
  *task.bandwidth = bandwidth_of<float>(task.rule, task.particles.count, __uint_as_float(lower),
                                        __uint_as_float(upper), sum / (count * (count - 1) / 2));
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
  const bool two = mean_of_two(task.ranks);
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
  const Count rank = lower_rank - counts.below;
  const auto size = static_cast<int64_t>(counts.listed);
  SelectRange range = SelectRange::between(state.bracket[0], state.bracket[kBracket - 1]);
  DoubtfulRange doubtful;
  int pass = 0;
  const auto count = [&] {
    count_listed(task, size, direct, range, doubtful, differences, histogram,
                 state.histograms[pass]);
    cooperative_groups::this_grid().sync();
    return find_rank(state.histograms[pass++], rank);
  };
  if (!direct) {
    range = products_range(task);
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
    if (upper > kInfinityKey) return miss();  // the list ends before it
  }
  if (first_block) write_bandwidth(task, lower, upper);
}

}  // namespace fused_ops
