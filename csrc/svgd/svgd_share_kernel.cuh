// SPDX-License-Identifier: BSD-3-Clause
// The median where several processes share the pairs (svgd_share.h), between the kernels that
// count.
//
// svgd_share_receive  takes the summed message of a pass and settles what the next one looks for
// svgd_share_narrow   a histogram of the list's distances from products
// svgd_share_digit    one digit of the keys on the list
// svgd_share_above    the smallest key on the list above the median
// svgd_share_send     writes this process's message of a pass
//
// A process counts with the kernels of svgd_bracket.cuh and, where there is no bracket or it
// missed, with those of svgd_median_kernel.cuh, whose scratch memory holds the digits of both.

#pragma once

#include "svgd/svgd_list.cuh"
#include "svgd/svgd_share.h"

namespace fused_ops {

static_assert(kShareDigitBits == kDigitBits);

struct ShareTask {
  BracketTask bracket;  // without a state where there is none
  MedianTask radix;
  const long long* received;  // the sum of all messages
  long long* sent;
};

// Whether the passes count pairs rather than what is on the list.
__device__ inline bool counts_pairs(const ShareTask& task) {
  return task.bracket.state == nullptr || task.bracket.state->missed != 0;
}

// Makes the sum over all processes that of this one's first block, which the passes add up.
__device__ inline void receive_sum(const ShareTask& task) {
  double sum = 0;
  for (int share = 0; share < task.radix.share.count; ++share) {
    sum += __longlong_as_double(task.received[kShareSlots + share]);
  }
  for (int block = threadIdx.x; block < task.radix.first_blocks; block += kTileThreads) {
    task.radix.partial_sums[block] = block == 0 ? sum : 0.0;
  }
}

__device__ inline void receive_histogram(const ShareTask& task, Count* histogram) {
  for (int bin = threadIdx.x; bin < kBins; bin += kTileThreads) {
    histogram[bin] = static_cast<Count>(task.received[kShareBins + bin]);
  }
  __syncthreads();
}

// The rank looked for becomes that on the list or, where the bracket missed, among all pairs.
__device__ inline void settle_rank(const ShareTask& task, Count below, bool missed) {
  if (threadIdx.x != 0) return;
  const auto rank = static_cast<Count>(task.radix.rank);
  task.bracket.state->missed = missed;
  task.radix.scratch->rank = missed ? rank : rank - below;
}

__device__ inline void receive_direct(const ShareTask& task) {
  BracketState& state = *task.bracket.state;
  const auto rank = static_cast<Count>(task.radix.rank);
  if (state.by_products != 0) {
    return settle_rank(task, state.products.below, rank < state.products.below);
  }
  const auto below = static_cast<Count>(task.received[kShareBelow]);
  const Count end = below + static_cast<Count>(task.received[kShareInside]);
  const Count last = rank + mean_of_two(task.radix.ranks);
  const bool nan = task.received[kShareNan] != 0;
  if (threadIdx.x == 0) task.radix.scratch->nan = nan;
  receive_sum(task);
  settle_rank(task, below,
              !nan && (rank < below || last >= end || task.received[kShareOverflowed] != 0));
}

__device__ inline void receive_narrow(const ShareTask& task) {
  BracketState& state = *task.bracket.state;
  if (state.by_products == 0 || state.missed != 0) return;
  receive_histogram(task, state.histograms[0]);
  const Count rank = task.radix.scratch->rank;
  const RankPlace lower = find_rank(state.histograms[0], rank);
  const RankPlace upper =
      mean_of_two(task.radix.ranks) ? find_rank(state.histograms[0], rank + 1) : lower;
  SelectRange range = products_range(task.bracket);
  DoubtfulRange doubtful;
  const bool settled =
      lower.found && upper.found && settle_products(task.bracket, lower, upper, range, doubtful);
  if (threadIdx.x == 0) state.doubtful = {doubtful.low, doubtful.high};
  if (!settled) settle_rank(task, 0, true);
}

template <typename T>
__device__ inline void receive_digit(const ShareTask& task, int digit) {
  MedianScratch& scratch = *task.radix.scratch;
  if (digit == 0 && counts_pairs(task)) {
    if (threadIdx.x == 0) scratch.nan = task.received[kShareNan] != 0;
    receive_sum(task);
  }
  receive_histogram(task, scratch.histograms[digit]);
  const bool first = digit == 0 && task.bracket.state == nullptr;
  pick_digit<T>(scratch, digit, first ? static_cast<Count>(task.radix.rank) : scratch.rank);
}

template <typename T>
__device__ inline void receive_above(const ShareTask& task) {
  if (threadIdx.x == 0) {
    Count complement = 0;  // of the smallest
    for (int share = 0; share < task.radix.share.count; ++share) {
      complement = max(complement, static_cast<Count>(task.received[kShareSlots + share]));
    }
    task.radix.scratch->next_above = complement;
  }
  __syncthreads();
  finish_median<T>(task.radix);
}

// One block; `pass` is the one that `received` sums up.
template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    svgd_share_receive(const __grid_constant__ ShareTask task, int pass) {
  switch (pass) {
    case SharePasses::products:
      if (threadIdx.x != 0) return;
      task.bracket.state->products.below = static_cast<Count>(task.received[kShareBelow]);
      if (task.received[kShareOverflowed] != 0) task.bracket.state->by_products = 0;
      return;
    case SharePasses::direct:
      return receive_direct(task);
    case SharePasses::narrow:
      return receive_narrow(task);
    case SharePasses::digits + DistanceKey<T>::digits:
      return receive_above<T>(task);
    default:
      return receive_digit<T>(task, pass - SharePasses::digits);
  }
}

__device__ inline int64_t listed(const BracketTask& task) {
  const BracketState& state = *task.state;
  return static_cast<int64_t>(state.by_products != 0 ? state.products.listed : state.direct.listed);
}

static __global__ void __launch_bounds__(kTileThreads)
    svgd_share_narrow(const __grid_constant__ BracketTask task) {
  __shared__ unsigned histogram[kBins];
  __shared__ WarpDifferences differences[kTileThreads / kWarpSize];
  if (task.state->by_products == 0 || task.state->missed != 0) return;
  count_listed(task, listed(task), false, products_range(task), {},
               differences[threadIdx.x / kWarpSize], histogram, task.state->histograms[0]);
}

static __global__ void __launch_bounds__(kTileThreads)
    svgd_share_digit(const __grid_constant__ ShareTask task, int digit) {
  __shared__ unsigned histogram[kBins];
  __shared__ WarpDifferences differences[kTileThreads / kWarpSize];
  const BracketState& state = *task.bracket.state;
  if (state.missed != 0) return;
  MedianScratch& scratch = *task.radix.scratch;
  const auto prefix = static_cast<unsigned>(scratch.prefix);
  const int shift = digit_shift<float>(digit);
  const int bits = digit_bits<float>(digit);
  for (int bin = threadIdx.x; bin < kBins; bin += kTileThreads) histogram[bin] = 0;
  __syncthreads();
  const auto matches = [&](unsigned key) { return key >> shift >> bits == prefix; };
  const auto bin_of = [&](unsigned key) { return key >> shift & ((1u << bits) - 1); };
  DoubtfulRange doubtful;
  if (digit == 0 && state.by_products != 0) doubtful = {state.doubtful.x, state.doubtful.y};
  for_each_listed(task.bracket, listed(task.bracket), doubtful,
                  differences[threadIdx.x / kWarpSize], [&](unsigned key) {
                    if (matches(key)) atomicAdd(&histogram[bin_of(key)], 1u);
                  });
  __syncthreads();
  flush_histogram(histogram, scratch.histograms[digit]);
  if (state.by_products == 0 && blockIdx.x == 0 && threadIdx.x < kBracket) {
    const unsigned key = state.bracket[threadIdx.x];
    const Count ties = state.equal[threadIdx.x];
    if (ties != 0 && matches(key)) atomicAdd(&scratch.histograms[digit][bin_of(key)], ties);
  }
}

static __global__ void __launch_bounds__(kTileThreads)
    svgd_share_above(const __grid_constant__ ShareTask task) {
  __shared__ WarpDifferences differences[kTileThreads / kWarpSize];
  const BracketState& state = *task.bracket.state;
  if (state.missed != 0) return;
  MedianScratch& scratch = *task.radix.scratch;
  const Maximum complement =
      warp_key_above(task.bracket, listed(task.bracket), state.by_products == 0,
                     static_cast<unsigned>(scratch.prefix), differences[threadIdx.x / kWarpSize]);
  if (threadIdx.x % kWarpSize == 0 && complement.bits != 0) {
    atomicMax(&scratch.next_above, ~Count{~complement.bits});
  }
}

// One block; writes the whole message.
template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    svgd_share_send(const __grid_constant__ ShareTask task, int pass) {
  const BracketTask& bracket = task.bracket;
  const MedianScratch& scratch = *task.radix.scratch;
  const int digit = pass - SharePasses::digits;
  const bool counted = digit >= 0 && digit < DistanceKey<T>::digits;
  const Count* bins = counted                       ? scratch.histograms[digit]
                      : pass == SharePasses::narrow ? bracket.state->histograms[0]
                                                    : nullptr;
  for (int word = threadIdx.x; word < share_words(task.radix.share.count); word += kTileThreads) {
    const bool is_bin = word >= kShareBins && word < kShareSlots;
    task.sent[word] =
        bins != nullptr && is_bin ? static_cast<long long>(bins[word - kShareBins]) : 0;
  }
  __syncthreads();
  const bool first_thread = threadIdx.x == 0;
  long long& slot = task.sent[kShareSlots + task.radix.share.index];
  const auto capacity = static_cast<Count>(bracket.capacity);
  if (pass == SharePasses::products) {
    const BracketState& state = *bracket.state;
    if (!first_thread || state.by_products == 0) return;
    task.sent[kShareBelow] = static_cast<long long>(state.products.below);
    task.sent[kShareOverflowed] = state.products.listed > capacity;
  } else if (pass == SharePasses::direct && bracket.state->by_products == 0) {
    const BracketState& state = *bracket.state;
    const double sum = sum_of_blocks(bracket.partial_sums, bracket.direct_blocks);
    if (!first_thread) return;
    task.sent[kShareBelow] = static_cast<long long>(state.direct.below);
    Count inside = state.direct.listed;
    for (int index = 0; index < kBracket; ++index) inside += state.equal[index];
    task.sent[kShareInside] = static_cast<long long>(inside);
    task.sent[kShareOverflowed] = state.direct.listed > capacity;
    task.sent[kShareNan] = state.nan;
    slot = __double_as_longlong(sum);
  } else if (digit == 0 && counts_pairs(task)) {
    const double sum = sum_of_blocks(task.radix.partial_sums, task.radix.first_blocks);
    if (!first_thread) return;
    task.sent[kShareNan] = scratch.nan;
    slot = __double_as_longlong(sum);
  } else if (digit == DistanceKey<T>::digits && first_thread) {
    slot = static_cast<long long>(scratch.next_above);
  }
}

}  // namespace fused_ops
