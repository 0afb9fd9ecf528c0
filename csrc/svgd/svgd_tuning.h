// SPDX-License-Identifier: BSD-3-Clause
// How the CUDA kernels of the SVGD update are launched: a policy as data, and one pure function
// that chooses it.

#pragma once

#include <algorithm>
#include <cstdint>

#include "svgd/svgd.h"

namespace fused_ops {

struct SvgdPolicy {
  bool store_distances;     // keep an (N, N) matrix rather than compute distances in each pass
  int count_blocks;         // of the median's passes
  int chunk;                // dimensions that a block of the update owns
  int64_t tiles_per_split;  // tiles of particles j that a block of the update walks over
  int splits;               // how many blocks share the particles j
};

// `max_chunk` and `source_tile` are what the update's kernel has for the accumulation type.
inline SvgdPolicy choose_svgd_policy(int64_t count, int64_t dim, int max_chunk, int source_tile,
                                     int multiprocessors) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  SvgdPolicy policy{};
  // Each pass and each chunk would compute them again, which past 64 dimensions costs more than
  // reading them.
  policy.store_distances = count <= kMaxStoredParticles && dim > 64;

  const int64_t edge = ceil_div(count, 64);
  policy.count_blocks =
      static_cast<int>(std::min<int64_t>(edge * (edge + 1) / 2, int64_t{multiprocessors} * 4));

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
