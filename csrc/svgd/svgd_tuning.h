// SPDX-License-Identifier: BSD-3-Clause
// How the CUDA kernels of the SVGD update are launched: a policy as data, and one pure function
// that chooses it.

#pragma once

#include <algorithm>
#include <cstdint>

#include "svgd/svgd.h"

namespace fused_ops {

// The tiles of one of the median's passes.
struct CountPolicy {
  int patch;   // pairs to a thread along each side of a tile: 2 or 4
  int blocks;  // each takes every blocks-th tile
};

struct SvgdPolicy {
  bool stream;              // whether the update streams particles, split into halves
  bool store_distances;     // keep an (N, N) matrix rather than compute distances in each pass
  CountPolicy first_count;  // of the pass that may fill the matrix
  CountPolicy count;        // of the others
  int chunk;                // dimensions that a block of the update owns
  int64_t tiles_per_split;  // tiles of particles j that a block of the update walks over
  int splits;               // how many blocks share the particles j
};

// `single` is whether the accumulation type is float32; `max_chunk` and `source_tile` are what the
// update's kernel has for the accumulation type.
inline SvgdPolicy choose_svgd_policy(int64_t count, int64_t dim, bool single, int max_chunk,
                                     int source_tile, int multiprocessors) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  SvgdPolicy policy{};
  policy.store_distances = count <= kMaxStoredParticles;
  policy.stream = count > kMaxStoredParticles && single;

  const auto count_policy = [&](int patch) {
    const int64_t edge = ceil_div(count, 16 * patch);
    const int64_t tiles = edge * (edge + 1) / 2;
    return CountPolicy{patch, static_cast<int>(std::min<int64_t>(tiles, multiprocessors * 4))};
  };
  // Small tiles give every multiprocessor several blocks, whose latencies overlap; large ones load
  // fewer coordinates for each pair. H200, whole median: 256 x 64 23.5 us against 37.8, 1024 x 32
  // 31.6 against 35.4, but 2048 x 64 121 against 92.
  policy.first_count = count_policy(count <= 1024 ? 2 : 4);
  policy.count = count_policy(4);

  policy.chunk = 4;
  for (const int chunk : {16, 32, 64}) {
    if (policy.chunk < dim && chunk <= max_chunk) policy.chunk = chunk;
  }
  // Two blocks for each multiprocessor, where the particles i and the chunks give fewer.
  const int64_t blocks = ceil_div(count, 64) * ceil_div(dim, policy.chunk);
  const int64_t tiles = ceil_div(count, source_tile);
  const int64_t wanted = std::clamp<int64_t>(2 * multiprocessors / blocks, 1, tiles);
  policy.tiles_per_split = ceil_div(tiles, wanted);
  policy.splits = static_cast<int>(ceil_div(tiles, policy.tiles_per_split));
  return policy;
}

}  // namespace fused_ops
