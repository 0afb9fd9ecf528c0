// SPDX-License-Identifier: BSD-3-Clause
// Where the CUDA kernels remember the upstream gradient last seen, so that the forward can form the
// gradients while it holds the rows.
//
// Whatever is remembered, the gradients are the same to the bit: a wrong guess costs time only.

#pragma once

#include <cuda_runtime_api.h>

#include "triplet/triplet.h"

namespace fused_ops {

constexpr int kTripletGuesses = 16384;  // places on each device, 16 bytes each

// What a place holds, all zero at first.
struct alignas(16) TripletGuess {
  double last;    // the upstream gradient last seen
  int known;      // whether there was one; until then it is taken for 1
  int surprised;  // whether it differed from the one before, so that a guess would be idle
};

// The place for calls like this one, or 0 where none is left. Only launches on one stream share a
// place, so that none changes it under another; a launch that a CUDA graph captures, which may run
// on any stream later, gets one of its own.
int triplet_guess_place(const TripletForward& params, int device, cudaStream_t stream);

}  // namespace fused_ops
