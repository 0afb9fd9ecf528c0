// SPDX-License-Identifier: BSD-3-Clause
// Particles around their mean, in two halves each: what tensor cores multiply.
//
//   y = (x - mean) * 2^e    with 2^e such that the largest |y| is in [2^8, 2^9)
//   high = half(y)          low = half(y - high)
//
// Together they hold 22 bits of y, and a dot product is high high + high low + low high.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "svgd/svgd.h"

namespace fused_ops {

// All in device memory.
struct SplitParticles {
  __half* high;          // (padded_count, padded_dim), zero where padded
  __half* low;           // (padded_count, padded_dim)
  float* norms;          // (padded_count): |y|^2
  float* mean;           // (dim)
  float* scale;          // 2^e, and the largest of the norms
  int64_t padded_count;  // a multiple of 128
  int padded_dim;        // 16, 32 or a multiple of 64
};

// Bytes of memory for the split and its scratch, 256-byte aligned.
int64_t svgd_split_bytes(const SvgdParticles& particles);

// Splits float32, float16 or bfloat16 particles into `memory`.
cudaError_t launch_svgd_split(const SvgdParticles& particles, void* memory, SplitParticles& split,
                              cudaStream_t stream);

}  // namespace fused_ops
