// SPDX-License-Identifier: BSD-3-Clause
// Particles around their mean, in two halves each: what tensor cores multiply.
//
//   y = (x - mean) * 2^e    with 2^e such that the largest |y| is in [2^8, 2^9)
//   high = half(y)          low = half(y - high)
//
// Together they hold 22 bits of y, and a dot product is high high + high low + low high.
//
// They are stored as the tensor cores want them in shared memory. A slot is a 64 x width matrix of
// halves, swizzled, high parts then low parts; a tile of 64 particles has padded_dim / width slots.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "svgd/svgd.h"

namespace fused_ops {

constexpr int kSplitTile = 64;  // particles

constexpr int split_width(int padded_dim) { return padded_dim < 64 ? padded_dim : 64; }
constexpr int split_slot_size(int width) { return 2 * kSplitTile * width; }

// All in device memory.
struct SplitParticles {
  __half* slots;  // (padded_count / 64, padded_dim / width, slot), zero where padded, or null
  float* norms;   // (padded_count): |y|^2, infinite where padded
  float* mean;    // (dim)
  float* scale;   // 2^e, and the largest of the norms
  int64_t padded_count;  // a multiple of 128
  int padded_dim;        // 16, 32 or a multiple of 64
};

// Bytes of memory for the split and its scratch, 256-byte aligned. Without `with_slots` only norms,
// mean and scale are wanted; slots are for at most kMostTensorDim dimensions.
int64_t svgd_split_bytes(const SvgdParticles& particles, bool with_slots);

// Where in `memory` the parts are.
SplitParticles svgd_split_parts(const SvgdParticles& particles, bool with_slots, void* memory);

// Splits float32 particles into `memory`.
cudaError_t launch_svgd_split(const SvgdParticles& particles, bool with_slots, void* memory,
                              SplitParticles& split, cudaStream_t stream);

}  // namespace fused_ops
