// SPDX-License-Identifier: BSD-3-Clause
// The CUDA launcher of the SVGD update of many particles, bandwidth known: on tensor cores where
// the device, the precision and the data allow it, else from direct differences.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "svgd/svgd.h"
#include "svgd/svgd_split.h"

namespace fused_ops {

// How the kernels share the particles j among blocks.
struct StreamPolicy {
  bool tensor_cores;
  int splits;  // of the streaming kernel
  int tiles_per_split;
  int direct_splits;
  int64_t direct_tiles_per_split;
  int direct_chunk;  // dimensions of the result that a block of the direct kernel owns
};

// `padded_dim` as in SplitParticles; `capability` is 10 * major + minor.
StreamPolicy choose_stream_policy(const SvgdUpdate& update, int padded_dim, int multiprocessors,
                                  int capability);

// Bytes of scratch on the current device; the memory must be 256-byte aligned.
int64_t svgd_stream_bytes(const SvgdUpdate& update, const SplitParticles& split);

// Particles in float32, float16 or bfloat16, at least one particle and dimension. `split` is the
// split of the same particles; without tensor cores only its mean and scale are read. The update's
// score and result are as in svgd.h. Returns the first error of the launches.
cudaError_t launch_svgd_stream(const SvgdUpdate& update, const SplitParticles& split, void* scratch,
                               cudaStream_t stream);

}  // namespace fused_ops
