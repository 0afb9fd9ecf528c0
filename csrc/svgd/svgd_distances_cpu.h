// SPDX-License-Identifier: BSD-3-Clause
// Squared distances on the CPU, the one place where they are computed: every pass of the median and
// the update see the same bits.
//
// Inner loops run over a fixed number of lanes (neighbouring particles j) with no floating-point
// contraction, so every instruction set that FUSED_OPS_CLONES builds them for gives the same bits.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/clones.h"
#include "svgd/svgd_kernel_cpu.h"

namespace fused_ops {

// The bits of a number.
template <typename T>
using Key = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

constexpr int64_t kColumnBlock = 512;  // particles j whose weights are in cache at a time

// Of functions that return lanes, which are all inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

// Neighbouring particles j in a register, or in the two or four that other instruction sets have.
template <typename T>
struct LanesOf {
  typedef T type __attribute__((vector_size(64)));
};
template <typename T>
using Lanes = typename LanesOf<T>::type;
template <typename T>
constexpr int kLanes = sizeof(Lanes<T>) / sizeof(T);

template <typename T>
FUSED_OPS_INLINE Lanes<T> load_lanes(const T* address) {
  Lanes<T> lanes;
  std::memcpy(&lanes, address, sizeof(lanes));
  return lanes;
}

template <typename T>
FUSED_OPS_INLINE T sum_of(const Lanes<T>& lanes) {
  T sum = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) sum += lanes[lane];
  return sum;
}

// Distances of particles [i, i + kRowBlock) from [j, j + columns), a multiple of the lanes. A file
// has clones of its own.
template <typename T>
FUSED_OPS_CLONES static void block_distances(const SvgdCpuParticles<T>& particles, int64_t i,
                                             int64_t j, int64_t columns,
                                             T (&distances)[kRowBlock][kColumnBlock]) {
  for (int64_t first = 0; first < columns; first += kLanes<T>) {
    Lanes<T> total[kRowBlock] = {};
    for (int64_t block = 0; block < particles.dim; block += kDimBlock) {
      Lanes<T> sums[kRowBlock] = {};
      const int64_t end = std::min(block + kDimBlock, particles.dim);
      for (int64_t k = block; k < end; ++k) {
        const T* x_i = particles.panels.at(k, i);
        const Lanes<T> x_j = load_lanes(particles.panels.at(k, j + first));
        for (int r = 0; r < kRowBlock; ++r) {
          const Lanes<T> difference = x_i[r] - x_j;
          sums[r] += difference * difference;
        }
      }
      for (int r = 0; r < kRowBlock; ++r) total[r] += sums[r];
    }
    for (int r = 0; r < kRowBlock; ++r) {
      std::memcpy(distances[r] + first, &total[r], sizeof(total[r]));
    }
  }
}

// As block_distances, from the stored matrix where there is one.
template <typename T>
void get_distances(const SvgdCpuParticles<T>& particles, int64_t i, int64_t j, int64_t columns,
                   T (&distances)[kRowBlock][kColumnBlock]) {
  if (particles.distances == nullptr) {
    return block_distances(particles, i, j, columns, distances);
  }
  for (int64_t r = 0; r < std::min<int64_t>(kRowBlock, particles.count - i); ++r) {
    const T* row = particles.distances + (i + r) * particles.padded + j;
    std::copy(row, row + columns, distances[r]);
  }
}

// Calls `visit(d2, count)` for runs of the pairs i < j whose i is in a row block.
template <typename T, typename Visit>
void for_each_run(const SvgdCpuParticles<T>& particles, int64_t block, const Visit& visit) {
  alignas(64) T distances[kRowBlock][kColumnBlock];
  const int64_t i = block * kRowBlock;
  const int64_t rows = std::min<int64_t>(kRowBlock, particles.count - i);
  for (int64_t j = i / kSvgdLanes<T> * kSvgdLanes<T>; j < particles.count; j += kColumnBlock) {
    const int64_t columns = std::min(kColumnBlock, particles.padded - j);
    get_distances(particles, i, j, columns, distances);
    const int64_t end = std::min(j + columns, particles.count);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t first = std::max(j, i + r + 1);
      if (first < end) visit(distances[r] + (first - j), end - first);
    }
  }
}

}  // namespace fused_ops
