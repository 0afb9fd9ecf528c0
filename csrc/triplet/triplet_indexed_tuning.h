// SPDX-License-Identifier: BSD-3-Clause
// How the CUDA kernels of triplet_margin_loss_indexed are launched: a policy as data, and one pure
// function that chooses it.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"

namespace fused_ops {

constexpr int kIndexedBlock = 128;      // threads
constexpr int kIndexedLeastBlocks = 2;  // that the registers of any multiprocessor leave room for
// Of the forward to a multiprocessor. H200, 262,144 triplets: 4, 8 and 16 blocks are alike with
// (8192, 512), with (8192, 509) 432, 422 and 375 us.
constexpr int kIndexedBlocks = 16;
// Of a thread to a row, at once, of `width` elements each. H200, 262,144 triplets, us with 2, 4, 8
// and 16: forward of (8192, 512) bfloat16 223, 157; of (8192, 509) float32 -, 374, 526, 673;
// backward of (8192, 512) bfloat16 308, 359; of (8192, 509) float32 -, 574, 473, 633.
constexpr int kIndexedForwardAccesses = 4;
constexpr int indexed_backward_accesses(int width) { return width == 1 ? 8 : width == 8 ? 2 : 4; }
// Tiles of a long row that are summed apart from those before: roundings grow with the number of
// summands, of 70,001 in one sum to 2e-6.
constexpr int64_t kIndexedRun = 8;
constexpr int kIndexedSmallestGroup = 8;  // threads whose accesses make up a cache line
constexpr int kIndexedLargestGroup = 32;  // threads, a warp
constexpr int64_t kIndexedMaxGridY = 65535;

// A share is what one group of threads takes of the sorted entries. There are enough to keep large
// GPUs busy some times over, but not more, for each has memory for two partial sums of a row. H200,
// backward with 4096, 8192 and 16384: (8192, 512) 299, 301 and 312 us; with 64 rows 266, 264, 325.
constexpr int64_t kIndexedMostShares = 8192;
constexpr int64_t kIndexedShareUnit = 16;  // entries

struct TripletIndexedPolicy {
  int forward_threads_per_row;   // a power of two up to 32
  int64_t row_blocks;            // of the forward; each takes every row_blocks-th group of triplets
  int backward_threads_per_row;  // a power of two up to 32
  int64_t column_tiles;          // parts of a row that the backward forms one by one
  int64_t share;                 // entries
  int64_t shares;
};

// `width` is how many elements an access moves. Shares do not depend on the device, so that neither
// does the order in which a gradient is summed. `forced_share` is 0 for no forced one.
inline TripletIndexedPolicy choose_triplet_indexed_policy(int64_t triplets, int64_t dim, int width,
                                                          int multiprocessors,
                                                          int64_t forced_share) {
  const auto threads_per_row = [&](int64_t accesses) {
    int threads = kIndexedSmallestGroup;
    while (threads < kIndexedLargestGroup && threads * accesses * width < dim) threads *= 2;
    return threads;
  };
  const int forward = threads_per_row(kIndexedForwardAccesses);
  const int64_t row_blocks = std::min(ceil_div(triplets, int64_t{kIndexedBlock / forward}),
                                      int64_t{kIndexedBlocks} * multiprocessors);
  const int64_t accesses = indexed_backward_accesses(width);
  const int backward = threads_per_row(accesses);
  const int64_t column_tiles =
      std::min(ceil_div(dim, backward * accesses * width), kIndexedMaxGridY);
  TripletIndexedPolicy policy{forward, row_blocks, backward, column_tiles, forced_share, 1};
  const int64_t entries = 3 * triplets;
  if (forced_share == 0) {
    policy.share = ceil_div(entries, kIndexedMostShares * kIndexedShareUnit) * kIndexedShareUnit;
  }
  policy.shares = ceil_div(entries, policy.share);
  return policy;
}

}  // namespace fused_ops
