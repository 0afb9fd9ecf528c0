// SPDX-License-Identifier: BSD-3-Clause
// The launcher of the one-launch kernel for few particles.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "svgd/svgd.h"

namespace fused_ops {

// Size of a tile, 16 * patch particles wide, and number of bands; no bands: not for this kernel.
struct SvgdSmallPolicy {
  int patch;
  int bands;
  int blocks() const { return bands * (bands - 1) / 2 + bands / 2; }
};

// `shared_bytes` is what a block may have at most (cudaDevAttrMaxSharedMemoryPerBlockOptin). A
// positive `patch` (1, 2, 4 or 8) forces that policy, for tests and benchmarks.
SvgdSmallPolicy svgd_small_policy(const SvgdParticles& particles, int multiprocessors,
                                  int shared_bytes, int patch = 0);

// Bytes of scratch memory, 16-byte aligned; uninitialised.
int64_t svgd_small_bytes(const SvgdParticles& particles, const SvgdSmallPolicy& policy);

// The update; with a `rule` its bandwidth comes from the median, and goes to `bandwidth` too unless
// that is null. cudaErrorCooperativeLaunchTooLarge where the blocks cannot be resident together.
cudaError_t launch_svgd_small(const SvgdUpdate& update, const BandwidthRule* rule,
                              const SvgdSmallPolicy& policy, void* scratch, void* bandwidth,
                              cudaStream_t stream);

// Only the bandwidth, one float.
cudaError_t launch_svgd_small_bandwidth(const SvgdParticles& particles, BandwidthRule rule,
                                        const SvgdSmallPolicy& policy, void* scratch,
                                        void* bandwidth, cudaStream_t stream);

}  // namespace fused_ops
