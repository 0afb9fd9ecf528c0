// SPDX-License-Identifier: BSD-3-Clause
// The exact median of many particles' squared distances, from one pass over the pairs.
//
// svgd_sample        distances of random pairs, the same in every run, and from their order a
//                    bracket that the wanted ranks miss by a chance of about 1e-6
// svgd_tensor_count  over all pairs i < j: how many are below the bracket, and a list of those in
//                    it; distances from products on tensor cores, known to within `error`
// svgd_direct_count  the same from direct differences, where those will not do
// svgd_select        the wanted ranks of the list. Distances that `error` leaves in doubt are
// formed
//                    again from direct differences first
//
// So the median is always one of the direct float32 distances, whose bits are those of
// svgd_distances.cuh. Non-negative floats order as their bits, their keys. Lists fill in any order;
// counts and selected values do not depend on it. Where the bracket misses, the radix passes of
// svgd_median_kernel.cuh start over.

#pragma once

#include "svgd/svgd_device.cuh"
#include "svgd/svgd_median_kernel.cuh"
#include "svgd/svgd_split.h"

namespace fused_ops {

constexpr int kBracket = 3;  // keys: its low end, the sample's middle, its high end
constexpr int kSampleDigits = DistanceKey<float>::digits;
constexpr int kSelectPasses = 6;
constexpr unsigned kNoKey = 0xffffffffu;  // of what is no pair: above all keys

// What a counting kernel leaves.
struct PairCounts {
  Count below;   // pairs below the bracket
  Count listed;  // places taken in the list
};

// In device memory; svgd_sample clears it.
struct alignas(16) BracketState {
  unsigned sample[kSampleDigits][kBracket][kBins];
  unsigned histograms[kSelectPasses][kBins];
  PairCounts products, direct;  // of svgd_tensor_count and svgd_direct_count
  Count equal[kBracket];  // pairs equal to the keys of the bracket; svgd_direct_count does not
                          // list them, for ties pile up there
  unsigned bracket[kBracket];
  unsigned by_products;  // whether svgd_tensor_count serves; then, of the split's scaled distances:
  float low, width;      // the bracket
  float error;
  unsigned nan;         // whether any distance is NaN
  unsigned next_above;  // complement of the smallest key above the one found
  unsigned missed;      // whether the radix passes have to start over
};
static_assert(sizeof(BracketState) % 16 == 0);

struct BracketTask {
  SvgdParticles particles;
  SplitParticles split;  // where `tensor_cores`
  bool tensor_cores;
  BandwidthRule rule;
  MedianRanks ranks;
  BracketState* state;
  unsigned* sample;  // keys
  int64_t sample_size;
  unsigned sample_ranks[kBracket];
  unsigned* list;  // keys
  int2* pairs;     // of the keys on the list, where `tensor_cores`
  int64_t capacity;
  float most_doubt;      // in BracketPolicy
  double* partial_sums;  // of all distances, by the blocks of svgd_direct_count
  int direct_blocks;
  float* bandwidth;
};

// Whether the pairs are to be counted from direct differences, once svgd_tensor_count is done.
__device__ inline bool wants_direct_count(const BracketTask& task) {
  return task.state->by_products == 0 ||
         task.state->products.listed > static_cast<Count>(task.capacity);
}

// This warp's memory for warp_distances.
using WarpDifferences = float[kWarpSize][kDimBlock + 1];

// The squared distance of each lane's pair (i, j), in lanes whose bit is set in `wanted`. Lanes
// read the coordinates of a pair together, and then add up one pair each, as the order of the terms
// demands.
__device__ inline float warp_distances(const SvgdParticles& particles, unsigned wanted, int64_t i,
                                       int64_t j, WarpDifferences& rows) {
  static_assert(kDimBlock == kWarpSize);
  const auto* data = static_cast<const float*>(particles.data);
  const int lane = threadIdx.x % kWarpSize;
  float distance = 0;
  for (int64_t d = 0; d < particles.dim; d += kDimBlock) {
    const bool inside = d + lane < particles.dim;
#pragma unroll 16
    for (int pair = 0; pair < kWarpSize; ++pair) {
      const int64_t pair_i = __shfl_sync(0xffffffffu, i, pair);
      const int64_t pair_j = __shfl_sync(0xffffffffu, j, pair);
      if (inside && (wanted >> pair & 1) != 0) {
        rows[pair][lane] =
            data[pair_i * particles.stride + d + lane] - data[pair_j * particles.stride + d + lane];
      }
    }
    __syncwarp();
    const auto width = static_cast<int>(min(particles.dim - d, int64_t{kDimBlock}));
    float sum = 0;
    for (int k = 0; k < width; ++k) sum = fmaf(rows[lane][k], rows[lane][k], sum);
    distance += sum;
    __syncwarp();
  }
  return distance;
}

struct RankPlace {
  unsigned bin;
  unsigned rank;   // within the bin
  unsigned count;  // of the bin
  bool found;      // whether the histogram reaches the rank at all
};

// The bins of complete histograms in device memory that hold `wanted` ranks: of histogram
// `histograms[index]` for rank `ranks[index]`. All threads of the block call it and get the same.
template <int wanted>
__device__ inline void find_ranks(const unsigned* const (&histograms)[wanted],
                                  const unsigned (&ranks)[wanted], RankPlace (&places)[wanted]) {
  constexpr int per_thread = kBins / kTileThreads;
  constexpr int warps = kTileThreads / kWarpSize;
  static_assert(per_thread == 8);
  __shared__ unsigned warp_sums[wanted][warps];
  __shared__ RankPlace found[wanted];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  unsigned counts[wanted][per_thread];
  unsigned sums[wanted];
  unsigned before[wanted];  // becomes the sum of all bins before this thread's
  __syncthreads();          // until the last call's places are read
#pragma unroll
  for (int index = 0; index < wanted; ++index) {
    const auto* bins = reinterpret_cast<const uint4*>(histograms[index] + threadIdx.x * per_thread);
    const uint4 low = __ldcg(bins);
    const uint4 high = __ldcg(bins + 1);
    const unsigned all[per_thread] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    sums[index] = 0;
#pragma unroll
    for (int bin = 0; bin < per_thread; ++bin) sums[index] += counts[index][bin] = all[bin];
    before[index] = sums[index];
    if (threadIdx.x == 0) found[index].found = false;
  }
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
#pragma unroll
    for (int index = 0; index < wanted; ++index) {
      const unsigned other = __shfl_up_sync(0xffffffffu, before[index], offset);
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
    const unsigned rank = ranks[index];
    if (before[index] > rank || rank >= before[index] + sums[index]) continue;
    bool settled = false;
#pragma unroll
    for (int bin = 0; bin < per_thread; ++bin) {
      if (!settled && rank < before[index] + counts[index][bin]) {
        settled = true;
        found[index] = {threadIdx.x * per_thread + bin, rank - before[index], counts[index][bin],
                        true};
      }
      before[index] += counts[index][bin];
    }
  }
  __syncthreads();
#pragma unroll
  for (int index = 0; index < wanted; ++index) places[index] = found[index];
}

__device__ inline RankPlace find_rank(const unsigned* histogram, unsigned rank) {
  RankPlace places[1];
  find_ranks<1>({histogram}, {rank}, places);
  return places[0];
}

// Adds a block's histogram in shared memory to one in device memory.
__device__ inline void flush_histogram(const unsigned* histogram, unsigned* result) {
  for (int bin = threadIdx.x; bin < kBins; bin += kTileThreads) {
    if (histogram[bin] != 0) atomicAdd(&result[bin], histogram[bin]);
  }
}

}  // namespace fused_ops
