// SPDX-License-Identifier: BSD-3-Clause
// The list that a counting kernel left of the pairs in the bracket (svgd_bracket.cuh): walks,
// histograms, and what its distances from products leave in doubt.

#pragma once

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

// Complement of the smallest key above `key` that this warp meets on the list or, with ties, in the
// bracket; 0 if there is none.
__device__ inline Maximum warp_key_above(const BracketTask& task, int64_t size, bool with_ties,
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
  return reduce_group<Maximum>(complement, kWarpSize, nullptr);
}

// Adds a histogram of the list to one in device memory.
__device__ inline void count_listed(const BracketTask& task, int64_t size, bool with_ties,
                                    const SelectRange& range, const DoubtfulRange& doubtful,
                                    WarpDifferences& differences, unsigned* histogram,
                                    Count* result) {
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
    const Count count = task.state->equal[threadIdx.x];  // may not fit into 32 bits
    if (bin < kBins && count != 0) atomicAdd(&result[bin], count);
  }
  __syncthreads();
  flush_histogram(histogram, result);
}

// The bracket of distances from products.
__device__ inline SelectRange products_range(const BracketTask& task) {
  const BracketState& state = *task.state;
  const float unscale = 1 / task.split.scale[0] / task.split.scale[0];
  return SelectRange::between(__float_as_uint(fmaxf(state.low * unscale, 0.0f)),
                              __float_as_uint((state.low + state.width) * unscale));
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

}  // namespace fused_ops
