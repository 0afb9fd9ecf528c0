// SPDX-License-Identifier: BSD-3-Clause
// The pass of the bracketed median over all pairs i < j, from direct differences
// (svgd_bracket.cuh).
//
// A block of 256 threads takes tiles of 128 x 128 pairs, a thread 8 x 8 of them in registers: 4
// wide loads from shared memory then feed 64 differences and 64 fma. Two blocks to a
// multiprocessor, so that one computes while the other loads; the 128 registers which that leaves
// hold one patch of sums, and those of earlier blocks of dimensions wait in shared memory.

#pragma once

#include "svgd/svgd_bracket.cuh"

namespace fused_ops {

constexpr int kPairTile = 128;
constexpr int kPairPatch = 8;
static_assert(kPairTile / kPairPatch * (kPairTile / kPairPatch) == kTileThreads);

struct alignas(16) CountShared {
  CoordinateTile<float, kPairTile> i, j;
  unsigned listed;           // of this tile
  Count first;               // where in the list they go
  unsigned equal[kBracket];  // of all the block's tiles
};
using CountSums = float[kPairPatch * kPairPatch][kTileThreads];

// With more than one block of dimensions the sums follow.
constexpr int count_shared_bytes(int64_t dim) {
  return static_cast<int>(sizeof(CountShared) + (dim > kDimBlock ? sizeof(CountSums) : 0));
}

// The pairs of a thread: two quads along each side, so that neighbouring lanes' wide loads fall on
// different banks.
struct PairPatch {
  int i = threadIdx.x / 64 * 32 + threadIdx.x % 32 / 8 * 4;
  int j = threadIdx.x / 32 % 2 * 64 + threadIdx.x % 8 * 4;
  __device__ int row(int a) const { return i + a / 4 * 16 + a % 4; }
  __device__ int column(int b) const { return j + b / 4 * 32 + b % 4; }
};

// Coordinates [d, d + kDimBlock) of 128 particles; past the last particle it repeats that one,
// which nothing uses.
__device__ inline void load_pair_tile(const SvgdParticles& particles, int64_t first, int64_t d,
                                      CoordinateTile<float, kPairTile>& tile) {
  const int k = threadIdx.x % kDimBlock;
  if (d + k >= particles.dim) return;
  const auto* data = static_cast<const float*>(particles.data) + first * particles.stride + d + k;
  const auto last = static_cast<int>(min(particles.count - 1 - first, int64_t{kPairTile}));
  constexpr int step = kTileThreads / kDimBlock * 4;
#pragma unroll
  for (int pass = 0; pass < kPairTile / step; ++pass) {
    const int row = pass * step + threadIdx.x / kDimBlock * 4;
    Vector<float, 4> values;
#pragma unroll
    for (int index = 0; index < 4; ++index) {
      values.value[index] = data[min(row + index, last) * particles.stride];
    }
    store<4>(&tile.at[k][row], values);
  }
}

// The patch of distances of a tile, with the bits of tile_distances. Ends in a barrier.
__device__ inline void pair_distances(const SvgdParticles& particles, int64_t first_i,
                                      int64_t first_j, CountShared& shared,
                                      float (&sums)[kPairPatch][kPairPatch]) {
  const PairPatch patch;
  auto& totals = *reinterpret_cast<CountSums*>(&shared + 1);
  for (int64_t d = 0; d < particles.dim; d += kDimBlock) {
    load_pair_tile(particles, first_i, d, shared.i);
    load_pair_tile(particles, first_j, d, shared.j);
    __syncthreads();
#pragma unroll
    for (int a = 0; a < kPairPatch; ++a) {
#pragma unroll
      for (int b = 0; b < kPairPatch; ++b) sums[a][b] = 0;
    }
    const auto width = static_cast<int>(min(particles.dim - d, int64_t{kDimBlock}));
#pragma unroll 2
    for (int k = 0; k < width; ++k) {
      Vector<float, 4> x_i[2], x_j[2];
#pragma unroll
      for (int quad = 0; quad < 2; ++quad) {
        x_i[quad] = load<4>(&shared.i.at[k][patch.i + quad * 16]);
        x_j[quad] = load<4>(&shared.j.at[k][patch.j + quad * 32]);
      }
#pragma unroll
      for (int a = 0; a < kPairPatch; ++a) {
#pragma unroll
        for (int b = 0; b < kPairPatch; ++b) {
          const float difference = x_i[a / 4].value[a % 4] - x_j[b / 4].value[b % 4];
          sums[a][b] = fmaf(difference, difference, sums[a][b]);
        }
      }
    }
    if (particles.dim > kDimBlock) {  // each thread its own column: no barrier
      const bool last = d + kDimBlock >= particles.dim;
#pragma unroll
      for (int a = 0; a < kPairPatch; ++a) {
#pragma unroll
        for (int b = 0; b < kPairPatch; ++b) {
          float& total = totals[a * kPairPatch + b][threadIdx.x];
          if (d > 0) sums[a][b] = total + sums[a][b];
          if (!last) total = sums[a][b];
        }
      }
    }
    __syncthreads();
  }
}

// What a thread's patches add up to.
struct PatchCounts {
  Count below = 0;
  double sum = 0;  // of all distances, where the median may be zero
  bool nan = false;
};

// Turns what is not a pair i < j of particles into a key that is in no bracket and no number.
__device__ inline void mask_patch(const SvgdParticles& particles, int64_t first_i, int64_t first_j,
                                  float (&distances)[kPairPatch][kPairPatch]) {
  const PairPatch patch;
  const bool diagonal = first_i == first_j;
  const auto left = static_cast<int>(min(particles.count - first_j, int64_t{kPairTile}));
#pragma unroll
  for (int a = 0; a < kPairPatch; ++a) {
#pragma unroll
    for (int b = 0; b < kPairPatch; ++b) {
      const bool counts = patch.column(b) < left && (!diagonal || patch.row(a) < patch.column(b));
      if (!counts) distances[a][b] = __uint_as_float(kNoKey);
    }
  }
}

// Counts a patch and lists what has to be. `shared.listed` is zero before and after.
__device__ inline void visit_patch(const BracketTask& task,
                                   const float (&distances)[kPairPatch][kPairPatch],
                                   const unsigned (&bracket)[kBracket], CountShared& shared,
                                   PatchCounts& counts) {
  BracketState& state = *task.state;
  const unsigned span = bracket[2] - bracket[0];
  const auto each = [&](auto visit) {
#pragma unroll
    for (int a = 0; a < kPairPatch; ++a) {
#pragma unroll
      for (int b = 0; b < kPairPatch; ++b) visit(__float_as_uint(distances[a][b]));
    }
  };
  const auto is_listed = [&](unsigned key) {
    return key - bracket[0] <= span && key != bracket[0] && key != bracket[1] && key != bracket[2];
  };
  unsigned below = 0, inside = 0, listed = 0, slot = 0;
  int largest = 0;  // signed: kNoKey is less than any distance
  each([&](unsigned key) {
    below += key < bracket[0];
    inside += key - bracket[0] <= span;
    largest = max(largest, static_cast<int>(key));
  });
  counts.below += below;
  if (bracket[0] == 0) {  // the mean of all takes a zero median's place
#pragma unroll
    for (int a = 0; a < kPairPatch; ++a) {
      float sum = 0;
#pragma unroll
      for (int b = 0; b < kPairPatch; ++b) {
        sum += __float_as_uint(distances[a][b]) == kNoKey ? 0.0f : distances[a][b];
      }
      counts.sum += sum;
    }
  }
  counts.nan |= largest > static_cast<int>(kInfinityKey);
  if (inside != 0) {
    // Ends and middle may coincide: the first takes all.
    unsigned equal[kBracket] = {inside};
    if (span != 0) {
      equal[0] = 0;
      each([&](unsigned key) {
        const bool is_low = key == bracket[0];
        const bool is_middle = !is_low && key == bracket[1];
        equal[0] += is_low;
        equal[1] += is_middle;
        equal[2] += !is_low && !is_middle && key == bracket[2];
      });
    }
#pragma unroll
    for (int index = 0; index < kBracket; ++index) {
      if (equal[index] != 0) atomicAdd(&shared.equal[index], equal[index]);
    }
    listed = inside - equal[0] - equal[1] - equal[2];
    if (listed != 0) slot = atomicAdd(&shared.listed, listed);
  }
  __syncthreads();
  if (threadIdx.x == 0 && shared.listed != 0) {
    shared.first = atomicAdd(&state.direct.listed, Count{shared.listed});
  }
  __syncthreads();
  const auto capacity = static_cast<Count>(task.capacity);
  if (listed != 0 && shared.first + shared.listed <= capacity) {
    unsigned* next = task.list + shared.first + slot;
    each([&](unsigned key) {
      if (is_listed(key)) *next++ = key;
    });
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.listed = 0;
}

static __global__ void __launch_bounds__(kTileThreads, 2)
    svgd_direct_count(const __grid_constant__ BracketTask task) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Sum<double> sums[kTileThreads / kWarpSize];
  auto& shared = *reinterpret_cast<CountShared*>(memory);
  BracketState& state = *task.state;
  if (!wants_direct_count(task)) return;
  const unsigned bracket[kBracket] = {state.bracket[0], state.bracket[1], state.bracket[2]};
  if (threadIdx.x == 0) shared.listed = 0;
  if (threadIdx.x < kBracket) shared.equal[threadIdx.x] = 0;
  PatchCounts counts;
  for_each_triangle_tile(task.particles.count, kPairTile, task.share,
                         [&](int64_t row, int64_t column) {
                           float distances[kPairPatch][kPairPatch];
                           const int64_t first_i = column * kPairTile;
                           const int64_t first_j = row * kPairTile;
                           pair_distances(task.particles, first_i, first_j, shared, distances);
                           if (row == column || first_j + kPairTile > task.particles.count) {
                             mask_patch(task.particles, first_i, first_j, distances);
                           }
                           visit_patch(task, distances, bracket, shared, counts);
                         });
  if (counts.below != 0) atomicAdd(&state.direct.below, counts.below);
  // The last tile ended in a barrier.
  if (threadIdx.x < kBracket)
    atomicAdd(&state.equal[threadIdx.x], Count{shared.equal[threadIdx.x]});
  if (counts.nan) state.nan = 1;  // every writer writes the same
  const Sum<double> sum = reduce_group(Sum<double>{counts.sum}, kTileThreads, sums);
  if (threadIdx.x == 0) task.partial_sums[blockIdx.x] = sum.value;
}

}  // namespace fused_ops
