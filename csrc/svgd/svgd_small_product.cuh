// SPDX-License-Identifier: BSD-3-Clause
// The products of a tile's weights with its sources' vectors, on tensor cores.
//
// Weights and vectors are split in two halves each, x = high + low to 2^-22, after scaling by
// powers of two that keep both parts normal numbers; three products of halves, summed in float32
// over no more than one tile, give float32's accuracy. The weights lie in shared memory once, as
// the tile has them, [row][column]: a band's targets are rows for the first half of the block and
// columns for the second. A paired tile holds the part above the diagonal of the first band's
// symmetric square and the part below it of the second's; what is missing is read transposed.

#pragma once

#include "common/device/mma.cuh"
#include "common/device/reduce.cuh"
#include "svgd/svgd_small_tile.cuh"

namespace fused_ops {

constexpr float kWeightExponent = 14;
constexpr float kWeightScale = 0x1p14f;  // of weights, at most 1
constexpr int kValueExponent = 13;       // vectors are scaled to below 2^14
constexpr uint32_t kHalfOnes = 0x3c003c00;

template <int size>
struct SmallPhiShared {
  static constexpr int edge = SmallShape<size>::edge;
  static constexpr int warps = SmallShape<size>::warps;
  static constexpr int stride = kDimBlock + 8;  // eight rows on different banks
  alignas(16) __half weights[2][edge * edge];   // high and low, swizzled
  union {
    alignas(16) __half values[2][2][edge * kDimBlock];  // high and low, by band, swizzled
    float scores[2][edge][kDimBlock];                   // by band, in the direct form
  };
  alignas(16) float coordinates[2][edge][stride];  // by band: x - m, or x in the direct form
  unsigned largest[2][warps];                      // bits of |x - m| and |score|
};

// Where an element of a matrix of halves lies: groups of eight change places within a row so that
// those of eight rows, which an instruction reads at once, are on different banks.
template <int columns>
__device__ inline int swizzled_place(int row, int column) {
  constexpr int groups = columns / 8 < 8 ? columns / 8 : 8;
  return row * columns + (column ^ (row / (8 / groups) % groups * 8));
}

// A warp's share of its half's product: a tile of 16 targets by 8 dimensions, or several.
template <int size>
struct SmallShare {
  static constexpr int warps_of_half = SmallShape<size>::warps / 2;
  static constexpr int warps_across = warps_of_half / size;
  static constexpr int dim_tiles = kDimBlock / 8 / warps_across;
  static_assert(8 * dim_tiles * warps_across == kDimBlock);

  static __device__ int half() { return threadIdx.x / (SmallShape<size>::threads / 2); }
  static __device__ int part() { return threadIdx.x / kWarpSize % warps_of_half; }
  static __device__ int target_tile() { return part() / warps_across; }
  static __device__ int dim_tile(int i) { return part() % warps_across * dim_tiles + i; }
  // Of value `e` of an accumulator.
  static __device__ int target(int e) {
    return 16 * target_tile() + threadIdx.x % kWarpSize / 4 + e / 2 * 8;
  }
  static __device__ int dimension(int tile) { return 8 * dim_tile(tile) + threadIdx.x % 4 * 2; }
};

template <int size>
struct SmallSums {
  float values[SmallShare<size>::dim_tiles][4];
  float totals[4];  // of the weights; the same in all columns
};

struct SplitOperand {
  uint32_t high[4];
  uint32_t low[4];
};

// Where a lane's rows of a warp's weights are. In the swizzle a step of 16 rows only adds, and one
// of 16 columns only flips bits.
template <int size>
struct SmallPlaces {
  static constexpr int edge = SmallShape<size>::edge;
  int row;             // of the tile's targets as stored
  int column;          // less the sources' part
  int transposed_row;  // of the first sources

  explicit __device__ SmallPlaces(int target_tile) {
    const int lane = threadIdx.x % kWarpSize;
    const int target = 16 * target_tile + lane / 8 % 2 * 8;
    row = (target + lane % 8) * edge;
    column = swizzled_place<edge>(target + lane % 8, lane / 16 * 8) - row;
    transposed_row = swizzled_place<edge>(lane / 16 * 8 + lane % 8, target);
  }
  __device__ int stored(int source_tile) const { return row + (column ^ 16 * source_tile); }
  __device__ int transposed(int source_tile) const {
    return transposed_row + 16 * edge * source_tile;
  }
};

// On the diagonal of a paired tile: one side as stored, the other from its mirror image, and
// between them the weight of a particle with itself.
__device__ inline void merge_mirrored(const SplitOperand& mirrored, bool above,
                                      SplitOperand& weights) {
  const int lane = threadIdx.x % kWarpSize;
  const __half2 scale = __floats2half2_rn(kWeightScale, kWeightScale);
  const uint32_t one = *reinterpret_cast<const uint32_t*>(&scale);
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int row = lane / 4 + word % 2 * 8;
    uint32_t stored = 0;  // the halves to take as stored
    uint32_t self = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = lane % 4 * 2 + word / 2 * 8 + i;
      const uint32_t half = 0xffffu << (16 * i);
      if (row == column) self |= half;
      if (row < column == above) stored |= half;
    }
    weights.high[word] = ((weights.high[word] & stored) | (mirrored.high[word] & ~stored)) & ~self;
    weights.high[word] |= one & self;
    weights.low[word] = ((weights.low[word] & stored) | (mirrored.low[word] & ~stored)) & ~self;
  }
}

template <int size>
__device__ inline void load_weights(const SmallPhiShared<size>& shared, bool paired,
                                    const SmallPlaces<size>& places, int source_tile,
                                    SplitOperand& weights) {
  const int target_tile = SmallShare<size>::target_tile();
  const int half = SmallShare<size>::half();
  const bool transposed =
      paired ? (half == 0 ? source_tile < target_tile : source_tile > target_tile) : half == 1;
  const int place = transposed ? places.transposed(source_tile) : places.stored(source_tile);
  load_matrices_either(weights.high, &shared.weights[0][place], transposed);
  load_matrices_either(weights.low, &shared.weights[1][place], transposed);
  if (paired && source_tile == target_tile) {
    SplitOperand mirrored;
    load_matrices<true>(mirrored.high, &shared.weights[0][places.transposed(source_tile)]);
    load_matrices<true>(mirrored.low, &shared.weights[1][places.transposed(source_tile)]);
    merge_mirrored(mirrored, half == 0, weights);
  }
}

__device__ inline void cube_weights(SplitOperand& weights) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const float2 k = join_pair({weights.high[word], weights.low[word]});
    const float first = k.x * (1 / kWeightScale);
    const float second = k.y * (1 / kWeightScale);
    const HalfPair pair = split_pair(k.x * first * first, k.y * second * second);
    weights.high[word] = pair.high;
    weights.low[word] = pair.low;
  }
}

// Sums of scaled weights times scaled vectors; `band` is the sources'. The weights' sums only if
// `totals`. With `cubed` the cubes of the weights.
template <bool cubed, int size>
__device__ inline void multiply_halves(const SmallPhiShared<size>& shared, bool paired, int band,
                                       bool totals, SmallSums<size>& sums) {
  using Share = SmallShare<size>;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) sums.values[n][e] = 0;
    if (totals) sums.totals[e] = 0;
  }
  const SmallPlaces<size> places(Share::target_tile());
  int value_places[Share::dim_tiles];
#pragma unroll
  for (int n = 0; n < Share::dim_tiles; ++n) {
    value_places[n] = swizzled_place<kDimBlock>(lane % 16, 8 * Share::dim_tile(n));
  }
#pragma unroll(size < 8 ? size : 1)
  for (int source_tile = 0; source_tile < size; ++source_tile) {
    uint32_t values[Share::dim_tiles][4];  // two words of the high parts, two of the low ones
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) {
      const int place = value_places[n] + 16 * kDimBlock * source_tile;
      load_matrices<true>(values[n], &shared.values[lane / 16][band][place]);
    }
    SplitOperand weights;
    load_weights(shared, paired, places, source_tile, weights);
    if constexpr (cubed) cube_weights(weights);
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) {
      add_product(sums.values[n], weights.low, values[n][0], values[n][1]);
    }
    if (totals) add_product(sums.totals, weights.low, kHalfOnes, kHalfOnes);
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) {
      add_product(sums.values[n], weights.high, values[n][2], values[n][3]);
    }
    if (totals) add_product(sums.totals, weights.high, kHalfOnes, kHalfOnes);
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) {
      add_product(sums.values[n], weights.high, values[n][0], values[n][1]);
    }
  }
}

}  // namespace fused_ops
