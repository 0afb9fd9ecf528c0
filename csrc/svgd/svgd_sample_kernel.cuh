// SPDX-License-Identifier: BSD-3-Clause
// The sample of the bracketed median, and what it decides (svgd_bracket.cuh). One cooperative
// launch: its blocks find three ranks of the sample digit by digit, with a barrier of the grid
// after each digit.

#pragma once

#include <cooperative_groups.h>

#include "svgd/svgd_bracket.cuh"

namespace fused_ops {

// splitmix64's finaliser: every bit of the result depends on every bit of the index.
__device__ inline uint64_t hash_index(uint64_t index) {
  index = (index + 1) * 0x9e3779b97f4a7c15ull;
  index = (index ^ (index >> 30)) * 0xbf58476d1ce4e5b9ull;
  index = (index ^ (index >> 27)) * 0x94d049bb133111ebull;
  return index ^ (index >> 31);
}

// Two different particles.
__device__ inline void sample_pair(int64_t index, int64_t count, int64_t& i, int64_t& j) {
  i = static_cast<int64_t>(__umul64hi(hash_index(2 * index), count));
  j = i + 1 + static_cast<int64_t>(__umul64hi(hash_index(2 * index + 1), count - 1));
  if (j >= count) j -= count;
}

// A bound on the difference between a scaled distance from products and the scaled direct one, both
// as rounded, in units of 2^-22: what the halves drop, 2; the norms, 2; each sum of products, which
// the tensor cores cut off after each of its three steps for 16 dimensions. And of the direct
// distance itself 16 roundings of its sums of 32 dimensions.
__device__ inline float distance_error(int padded_dim, float largest_norm, float high) {
  constexpr float unit = 0x1p-22f;
  const float terms = 4 + 3.0f / 32 * static_cast<float>(padded_dim);
  return unit * (terms * 2 * largest_norm + 5 * high);
}

// By one thread. Tensor cores serve where the bracket is wide beside the error of their distances.
__device__ inline void settle_bracket(const BracketTask& task) {
  BracketState& state = *task.state;
  if (!task.tensor_cores) return;
  constexpr float least = 1e-30f;  // a distance of which a float keeps all digits
  const float scale = task.split.scale[0];
  const float low = __uint_as_float(state.bracket[0]);
  const float high = __uint_as_float(state.bracket[kBracket - 1]);
  const float width = (high - low) * scale * scale;
  const float error =
      distance_error(task.split.padded_dim, task.split.scale[1], high * scale * scale);
  if (low >= least && isfinite(width) && 6 * error <= task.most_doubt * width) {
    state.by_products = 1;
    state.low = low * scale * scale - 3 * error;
    state.width = width + 6 * error;
    state.error = error;
  }
}

static __global__ void __launch_bounds__(kTileThreads)
    svgd_sample(const __grid_constant__ BracketTask task) {
  union Shared {
    WarpDifferences differences[kTileThreads / kWarpSize];
    unsigned histograms[kBracket][kBins];
  };
  __shared__ Shared shared;
  const auto grid = cooperative_groups::this_grid();
  BracketState& state = *task.state;
  const int64_t first = int64_t{blockIdx.x} * kTileThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kTileThreads;
  auto* words = reinterpret_cast<uint4*>(&state);
  for (int64_t at = first; at < int64_t{sizeof(BracketState) / sizeof(uint4)}; at += step) {
    words[at] = uint4{0, 0, 0, 0};
  }
  auto cleared = grid.barrier_arrive();
  for (int64_t at = first; at < task.sample_size; at += step) {  // a multiple of the block's size
    int64_t i, j;
    sample_pair(at, task.particles.count, i, j);
    auto& differences = shared.differences[threadIdx.x / kWarpSize];
    const float distance = warp_distances(task.particles, ~0u, i, j, differences);
    task.sample[at] = __float_as_uint(distance);
  }
  grid.barrier_wait(std::move(cleared));
  unsigned prefixes[kBracket] = {};
  Count ranks[kBracket];
#pragma unroll
  for (int index = 0; index < kBracket; ++index) ranks[index] = task.sample_ranks[index];
  for (int digit = 0; digit < kSampleDigits; ++digit) {
    const int shift = digit_shift<float>(digit);
    const int bits = digit_bits<float>(digit);
    const int searched = digit == 0 ? 1 : kBracket;  // the first digit's counts serve all
    __syncthreads();
    for (int bin = threadIdx.x; bin < searched * kBins; bin += kTileThreads) {
      shared.histograms[0][bin] = 0;
    }
    __syncthreads();
    for (int64_t at = first; at < task.sample_size; at += step) {
      const unsigned key = task.sample[at];
      const unsigned bin = key >> shift & ((1u << bits) - 1);
#pragma unroll
      for (int index = 0; index < kBracket; ++index) {
        if (index < searched && key >> shift >> bits == prefixes[index]) {
          atomicAdd(&shared.histograms[index][bin], 1u);
        }
      }
    }
    __syncthreads();
    for (int index = 0; index < searched; ++index) {
      flush_histogram(shared.histograms[index], state.sample[digit][index]);
    }
    grid.sync();
    const auto& histograms = state.sample[digit];
    RankPlace places[kBracket];
    find_ranks<kBracket, unsigned>(
        {histograms[0], histograms[digit == 0 ? 0 : 1], histograms[digit == 0 ? 0 : 2]}, ranks,
        places);
#pragma unroll
    for (int index = 0; index < kBracket; ++index) {
      prefixes[index] = prefixes[index] << bits | places[index].bin;
      ranks[index] = places[index].rank;
    }
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
#pragma unroll
  for (int index = 0; index < kBracket; ++index) state.bracket[index] = prefixes[index];
  settle_bracket(task);
}

}  // namespace fused_ops
