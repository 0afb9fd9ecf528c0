// SPDX-License-Identifier: BSD-3-Clause
// The CPU kernels of triplet_margin_loss on raw pointers, in pieces that threads may share.
//
// An item is a chunk of a row (a whole row up to kTripletChunk elements). How rows are cut does not
// depend on the number of threads, so neither do the results.

#pragma once

#include <cstdint>

#include "triplet/triplet.h"

namespace fused_ops {

// No more, for a lane adds up a 32nd of a chunk in float32, one element after the other.
constexpr int64_t kTripletChunk = 2048;

inline int64_t triplet_chunks(int64_t dim) { return (dim + kTripletChunk - 1) / kTripletChunk; }

// Bytes of scratch memory that the forward passes share.
int64_t triplet_forward_scratch_bytes(const TripletForward& params);

// First pass: the distances of items [begin, end).
void triplet_forward_items(const TripletForward& params, void* scratch, int64_t begin, int64_t end);

// Second pass, by one thread: rows of several chunks, and the reduced loss.
void triplet_forward_finish(const TripletForward& params, void* scratch);

// The gradients of items [begin, end).
void triplet_backward_items(const TripletBackward& params, int64_t begin, int64_t end);

}  // namespace fused_ops
