// SPDX-License-Identifier: BSD-3-Clause
// How the CUDA kernels of triplet_margin_loss are launched: a policy as data, and one pure function
// that chooses it.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"

namespace fused_ops {

// How the threads share the rows.
enum class TripletForm : int8_t {
  automatic = -1,
  warp = 0,   // a row to a warp or a part of one
  block = 1,  // a row to a block
  split = 2,  // a row to several blocks
};
constexpr const char* kTripletForms[] = {"warp", "block", "split"};
constexpr int kTripletFormCount = 3;

// An access moves 16 bytes. Where gradients may be formed, a slot of shared memory takes the same
// access to each of the three inputs; each thread holds rows in slots of its own.
constexpr int kTripletAccessBytes = 16;
constexpr int kTripletSlotBytes = 3 * kTripletAccessBytes;
constexpr int kTripletSlots = 8;     // of a thread, at most
constexpr int kTripletAccesses = 4;  // of a thread that come at once, for its registers' sake
constexpr int kTripletLine = 8;      // accesses that make up a cache line
constexpr int kTripletWarpFormBlock = 128, kTripletSmallestBlock = 128, kTripletLargestBlock = 512;
// Bytes of a row that a block can hold where shared memory is ample.
constexpr int kTripletLongestHeldRow = kTripletLargestBlock * kTripletSlots * kTripletAccessBytes;
// Elements of a row that one block sums up, where blocks suffice: beyond, roundings add up in the
// sums of its threads. Of 1,000,000 in one block they are 3e-6.
constexpr int64_t kTripletLongestSum = 1 << 17;
// Bytes for the kernel's reductions, and what the system takes for each block.
constexpr int kTripletOtherShared = 2048;
constexpr int kTripletThreadsPerProcessor = 1024;  // that their registers leave room for
constexpr int64_t kTripletMaxRowBlocks = 65535;    // the limit of gridDim.y

struct TripletPolicy {
  TripletForm form;
  int threads_per_block;
  int threads_per_row;   // a power of two up to 32, or threads_per_block
  int accesses;          // of a thread to a row that it holds, or else what it has at once
  int stages;            // rows that it holds in slots, or tiles: 1, or 2 with the next one
  int64_t segments;      // blocks that share a row
  int64_t segment_size;  // elements of a row that one block reads, but for the last
  int64_t row_blocks;    // blocks along the rows; each takes every row_blocks-th group of rows, or
                         // with tiles a range of them
  bool holds_rows;       // whether threads can hold whole rows, so that the forward forms gradients
  int tile_rows;         // rows in a tile (triplet_tile_kernel.cuh), or 0 where there are none
                         // (triplet_kernel.cuh)
  int shared_bytes;      // of the tiles, or the slots where gradients are formed
};

// Elements of a tile's rows in the memory for one input: they start anywhere within an access.
constexpr int64_t triplet_tile_capacity(int64_t rows, int64_t dim, int width) {
  return ceil_div(rows * dim + width - 1, width) * width;
}

// How a block shares a tile, for rows of up to `longest` elements.
struct TripletTileShape {
  int threads_per_block;
  int threads_per_row;
  int64_t longest;
};

// The first one that fits is taken. It gives few threads to a row, for each of them costs once a
// row, and their reduction more if wider than a warp. H200, forward: (1048576, 63) float32 with 2,
// 4 and 16 threads to a row 197, 204 and 275 us; (65536, 1001) float32 with 32, 128 and 256 threads
// 192, 202 and 325.
constexpr TripletTileShape kTripletTileShapes[] = {
    {256, 1, 8},     {256, 2, 96},     {128, 2, 64},          {256, 16, 512},
    {256, 32, 2048}, {128, 128, 2400}, {256, 256, INT64_MAX}, {512, 512, INT64_MAX}};
constexpr int kTripletTileStages = 2;
constexpr int kTripletTileBlocks = 2;  // on a multiprocessor, whose memory tiles fill

// How odd rows that lie one behind another are shared in tiles. `tile_rows` stays 0 where they are
// too long for that.
inline void choose_triplet_tile(TripletPolicy& policy, int64_t rows, int64_t dim, int width,
                                int multiprocessors, int shared_memory) {
  const int size = kTripletAccessBytes / width;
  const auto bytes = [&](int64_t tile_rows) {
    return kTripletTileStages * 3 * triplet_tile_capacity(tile_rows, dim, width) * size;
  };
  for (const auto& shape : kTripletTileShapes) {
    const int64_t groups = shape.threads_per_block / shape.threads_per_row;
    const bool fits = dim <= shape.longest && bytes(groups) <= shared_memory - kTripletOtherShared;
    if (!fits || (groups > 1 && rows < groups * multiprocessors)) continue;
    const int64_t share = ceil_div(rows, int64_t{kTripletTileBlocks} * multiprocessors);
    int64_t tile_rows = groups;
    while (tile_rows < share &&
           bytes(tile_rows + groups) <= shared_memory / kTripletTileBlocks - kTripletOtherShared) {
      tile_rows += groups;
    }
    policy.threads_per_block = shape.threads_per_block;
    policy.threads_per_row = shape.threads_per_row;
    policy.stages = kTripletTileStages;
    policy.tile_rows = static_cast<int>(tile_rows);
    policy.shared_bytes = static_cast<int>(bytes(tile_rows));
    return;
  }
}

// `width` is how many elements an access moves; `whole` is whether rows start and end where
// accesses do; `packed` is whether rows lie one behind another from a 16-byte boundary on;
// `shared_memory` is what a block may have of a multiprocessor's, in bytes.
inline TripletPolicy choose_triplet_policy(int64_t rows, int64_t dim, int width, bool whole,
                                           bool packed, int multiprocessors, int shared_memory,
                                           TripletForm form) {
  const int64_t span = whole ? dim : dim + width - 1;  // with what the first access may have before
  const int64_t accesses = ceil_div(span, width);      // to a row

  if (form == TripletForm::automatic) {
    // Rows are split only where whole rows leave multiprocessors idle, or are too long for one sum.
    form = accesses <= 32 * kTripletAccesses ? TripletForm::warp
           : span > kTripletLongestSum ||
                   (rows < multiprocessors && accesses > 2 * int64_t{kTripletLargestBlock})
               ? TripletForm::split
               : TripletForm::block;
  }

  TripletPolicy policy{form, kTripletLargestBlock, kTripletLargestBlock, 1, 1, 1, span, 1, false, 0,
                       0};
  if (form == TripletForm::warp) {
    policy.threads_per_block = kTripletWarpFormBlock;
    // Few threads to a row, for what each of them does once a row weighs most where rows are short;
    // but enough to read whole cache lines. H200, (1048576, 64) float32: 4 threads to a row 207 us,
    // 8 threads 188.
    // Many where rows are too few for all multiprocessors: (256, 128) float32 with 8 and 32 threads
    // to a row 3.97 and 3.69 us in a CUDA graph.
    policy.threads_per_row = 1;
    while (policy.threads_per_row < 32 && policy.threads_per_row < accesses &&
           (policy.threads_per_row < kTripletLine ||
            policy.threads_per_row * kTripletAccesses < accesses ||
            rows * policy.threads_per_row < kTripletWarpFormBlock * multiprocessors)) {
      policy.threads_per_row *= 2;
    }
    // Larger blocks where that leaves few multiprocessors idle: each then reads a longer stretch of
    // memory, and the last one has fewer sums to add. H200, 128, 256 and 512 threads: (65536, 256)
    // float16 31.1, 27.8 and 27.3 us in a CUDA graph, but with gradients 63.1, 57.5 and 62.7;
    // (8192, 768) bfloat16 9.5, 9.5 and 10.1; (4096, 128) float32 4.85, 4.75 and 5.4.
    if (2 * rows * policy.threads_per_row >= 3 * int64_t{kTripletWarpFormBlock} * multiprocessors) {
      policy.threads_per_block = 2 * kTripletWarpFormBlock;
    }
  } else if (form == TripletForm::block) {
    // Two to eight accesses to a thread. H200, float32: (65536, 1024) with 64, 128 and 256 threads
    // 209, 185 and 274 us (with gradients, 64 and 128: 409 and 422; (8192, 1024): 66 and 55);
    // (32768, 8192) with 256 and 512 threads 711 and 717.
    policy.threads_per_block = kTripletSmallestBlock;
    while (policy.threads_per_block * kTripletAccesses < accesses &&
           policy.threads_per_block < kTripletLargestBlock / 2) {
      policy.threads_per_block *= 2;
    }
    if (policy.threads_per_block * kTripletSlots < accesses) {
      policy.threads_per_block = kTripletLargestBlock;
    }
    policy.threads_per_row = policy.threads_per_block;
  }

  if (packed && !whole && form != TripletForm::split) {
    choose_triplet_tile(policy, rows, dim, width, multiprocessors, shared_memory);
  }
  const int slots = std::min(kTripletSlots, (shared_memory - kTripletOtherShared) /
                                                (policy.threads_per_block * kTripletSlotBytes));
  const int64_t needed = ceil_div(accesses, policy.threads_per_row);
  policy.holds_rows = form != TripletForm::split && (policy.tile_rows > 0 || needed <= slots);
  policy.accesses =
      policy.holds_rows ? static_cast<int>(needed) : std::min(kTripletAccesses, slots);
  int per_processor = kTripletThreadsPerProcessor / policy.threads_per_block;  // blocks
  const auto shared_bytes = [&](int stages) {
    return policy.threads_per_block * policy.accesses * stages * kTripletSlotBytes;
  };
  if (policy.tile_rows == 0) {
    // The next row comes meanwhile where that takes no other block's memory.
    policy.stages =
        per_processor * (shared_bytes(2) + kTripletOtherShared) <= shared_memory ? 2 : 1;
    policy.shared_bytes = shared_bytes(policy.stages);
  } else {
    per_processor =
        std::clamp(shared_memory / (policy.shared_bytes + kTripletOtherShared), 1, per_processor);
  }
  const int64_t resident = int64_t{per_processor} * multiprocessors;
  if (form == TripletForm::split) {
    const int64_t least = int64_t{policy.threads_per_block} * policy.accesses * width;
    // One block to a multiprocessor: H200, (128, 65536) float32 with one and two blocks to a row
    // 28.4 and 30.1 us in a CUDA graph, since segments are handed over before losses are.
    const int64_t segments =
        std::clamp(std::min(multiprocessors / rows, ceil_div(span, least)),
                   std::min(ceil_div(span, kTripletLongestSum), resident), resident);
    policy.segment_size = ceil_div(ceil_div(span, segments), width) * width;
    policy.segments = ceil_div(span, policy.segment_size);
  }
  policy.row_blocks = std::min(
      {ceil_div(rows, policy.tile_rows > 0 ? policy.tile_rows
                                           : policy.threads_per_block / policy.threads_per_row),
       std::max<int64_t>(resident / policy.segments, 1), kTripletMaxRowBlocks});
  return policy;
}

}  // namespace fused_ops
