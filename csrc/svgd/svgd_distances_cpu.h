// SPDX-License-Identifier: BSD-3-Clause
// Squared distances on the CPU, the one place where they are computed: every pass of the median and
// the update see the same bits.

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

// Neighbouring particles j in a vector of some bytes.
template <typename T, int bytes>
struct LanesOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <typename T, int bytes>
using Lanes = typename LanesOf<T, bytes>::type;
template <typename T, int bytes>
constexpr int kLanes = bytes / sizeof(T);

template <int bytes, typename T>
FUSED_OPS_INLINE Lanes<T, bytes> load_lanes(const T* address) {
  Lanes<T, bytes> lanes;
  std::memcpy(&lanes, address, sizeof(lanes));
  return lanes;
}

// Distances of particles [i, i + kRowBlock) from [j, j + columns), whole panels.
template <typename T>
void block_distances(const SvgdCpuParticles<T>& particles, int64_t i, int64_t j, int64_t columns,
                     T (&distances)[kRowBlock][kColumnBlock]) {
  with_vectors([&](auto vector_bytes) FUSED_OPS_INLINE_LAMBDA {
    constexpr int bytes = vector_bytes;
    constexpr int together = 2;  // vectors that an x_i once loaded serves
    constexpr int lanes = kLanes<T, bytes>;
    static_assert(kSvgdLanes<T> % (together * lanes) == 0);
    using Sums = Lanes<T, bytes>[kRowBlock][together];
    for (int64_t first = 0; first < columns; first += together * lanes) {
      Sums total = {};
      for (int64_t block = 0; block < particles.dim; block += kDimBlock) {
        Sums sums = {};
        const int64_t end = std::min(block + kDimBlock, particles.dim);
        for (int64_t k = block; k < end; ++k) {
          const T* x_i = particles.panels.at(k, i);
          const T* x_j = particles.panels.at(k, j + first);
          for (int v = 0; v < together; ++v) {
            const Lanes<T, bytes> x = load_lanes<bytes>(x_j + v * lanes);
            for (int r = 0; r < kRowBlock; ++r) {
              const Lanes<T, bytes> difference = x_i[r] - x;
              sums[r][v] += difference * difference;
            }
          }
        }
        for (int r = 0; r < kRowBlock; ++r) {
          for (int v = 0; v < together; ++v) total[r][v] += sums[r][v];
        }
      }
      for (int r = 0; r < kRowBlock; ++r) {
        std::memcpy(distances[r] + first, &total[r], sizeof(total[r]));
      }
    }
  });
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
