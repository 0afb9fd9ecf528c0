// SPDX-License-Identifier: BSD-3-Clause
// How the CUDA kernels of triplet_margin_loss are launched: a policy as data, and one pure function
// that chooses it.

#pragma once

#include <algorithm>
#include <cstdint>

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

struct TripletPolicy {
  TripletForm form;
  int threads_per_block;
  int threads_per_row;   // a power of two up to 32, or threads_per_block
  int64_t segments;      // blocks that share a row
  int64_t segment_size;  // elements of a row that one block reads, but for the last
  int64_t row_blocks;    // blocks along the rows; each takes every row_blocks-th group of rows
};

constexpr int kTripletBlock = 256;
constexpr int kTripletSmallBlock = 1024;
constexpr int64_t kTripletMaxRowBlocks = 65535;  // the limit of gridDim.y

// `width` is how many elements one access moves; `reduces` is whether the rows' losses are added.
inline TripletPolicy choose_triplet_policy(int64_t rows, int64_t dim, int element_size, int width,
                                           bool reduces, int multiprocessors, TripletForm form) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t accesses = ceil_div(dim, width);  // of a row
  const int64_t resident = int64_t{multiprocessors} * 2048;

  if (form == TripletForm::automatic) {
    // A warp makes up to 8 accesses of each input; past that the block's longer reach hides more
    // latency. Rows are split only where whole rows leave multiprocessors idle.
    const bool few_rows = rows < 2 * int64_t{multiprocessors};
    form = accesses <= 8 * 32                                  ? TripletForm::warp
           : few_rows && accesses > 4 * int64_t{kTripletBlock} ? TripletForm::split
                                                               : TripletForm::block;
  }

  TripletPolicy policy{form, kTripletBlock, kTripletBlock, 1, dim, 1};
  if (form == TripletForm::warp) {
    // One block writes the reduced loss itself, which saves the second launch (about 4 us of host
    // time); past half a megabyte one multiprocessor would read longer than that. Its few threads
    // must each have several loads in flight, which a second warp's would do elsewhere.
    const bool small = reduces && 3 * rows * dim * element_size <= 512 * 1024;
    const int64_t lanes = small ? ceil_div(accesses, 4) : accesses;
    policy.threads_per_row = 1;
    while (policy.threads_per_row < 32 && policy.threads_per_row < lanes) {
      policy.threads_per_row *= 2;
    }
    if (small) policy.threads_per_block = kTripletSmallBlock;
  }
  if (form == TripletForm::split) {
    const int64_t least = int64_t{4} * kTripletBlock * width;  // elements worth a block
    const int64_t wanted = ceil_div(int64_t{multiprocessors} * 8, rows);
    const int64_t segments = std::max<int64_t>(std::min(wanted, ceil_div(dim, least)), 1);
    policy.segment_size = ceil_div(ceil_div(dim, segments), width) * width;
    policy.segments = ceil_div(dim, policy.segment_size);
  }
  if (policy.threads_per_block == kTripletBlock) {
    const int64_t groups = policy.threads_per_block / policy.threads_per_row;
    const int64_t blocks = form == TripletForm::split ? rows : resident / kTripletBlock;
    policy.row_blocks = std::min({ceil_div(rows, groups), blocks, kTripletMaxRowBlocks});
  }
  return policy;
}

}  // namespace fused_ops
