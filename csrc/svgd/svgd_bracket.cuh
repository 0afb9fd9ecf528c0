// SPDX-License-Identifier: BSD-3-Clause
// The exact median of many particles' squared distances, from one pass over the pairs.
//
// svgd_sample        distances of random pairs, the same in every run, and from their order a
//                    bracket that the wanted ranks miss by a chance of about 1e-6
// svgd_tensor_count  over all pairs i < j: how many are below the bracket, and a list of those in
//                    it; distances from products on tensor cores, known to within `error`
// svgd_direct_count  the same from direct differences, where those will not do
// svgd_select        the wanted ranks of the list. Distances that `error` leaves in doubt are
//                    formed again from direct differences first
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
  Count histograms[kSelectPasses][kBins];
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
  uint2 doubtful;       // keys of the list to be formed again; used where the pairs are shared
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
  Count sample_ranks[kBracket];
  unsigned* list;  // keys
  int2* pairs;     // of the keys on the list, where `tensor_cores`
  int64_t capacity;
  float most_doubt;      // in BracketPolicy
  double* partial_sums;  // of all distances, by the blocks of svgd_direct_count
  int direct_blocks;
  PairShare share;  // what the counting kernels count
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

}  // namespace fused_ops
