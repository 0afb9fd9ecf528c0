// SPDX-License-Identifier: BSD-3-Clause
// The parts of a bracketed median's launch (svgd_bracket.cuh), for one process that counts all
// pairs and for several that share them.

#pragma once

#include "common/memory_parts.h"
#include "svgd/svgd_bracket.cuh"
#include "svgd/svgd_median_launch.cuh"

namespace fused_ops {

// A task's parts of the scratch memory, and the radix passes that replace it where it misses.
struct BracketMemory {
  BracketTask task;
  MedianTask radix;
};

BracketMemory make_bracket(const SvgdParticles& particles, BandwidthRule rule,
                           const SvgdPolicy& policy, const DeviceLimits& limits,
                           MemoryParts& parts);

// Blocks of a cooperative launch for `work` threads: all of them resident, 4 to a multiprocessor
// with at most 48 KB of shared memory and, by their launch bounds, 64 registers.
int64_t cooperative_blocks(int64_t work, const DeviceLimits& limits);

// Each returns the first error of its launches. The counts are of the task's share.
cudaError_t launch_bracket_sample(BracketTask& task, const DeviceLimits& limits,
                                  cudaStream_t stream);
cudaError_t launch_tensor_count(const BracketTask& task, const SvgdPolicy& policy,
                                cudaStream_t stream);
cudaError_t launch_direct_count(const BracketTask& task, cudaStream_t stream);

}  // namespace fused_ops
