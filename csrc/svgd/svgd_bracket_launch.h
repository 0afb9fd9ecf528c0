// SPDX-License-Identifier: BSD-3-Clause
// The CUDA launcher of the bandwidth of many particles, by a bracketed median.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device_limits.h"
#include "svgd/svgd.h"
#include "svgd/svgd_split.h"
#include "svgd/svgd_tuning.h"

namespace fused_ops {

// Bytes of scratch, 256-byte aligned. `policy` as chosen for the particles, with a bracket.
int64_t svgd_bracket_bytes(const SvgdParticles& particles, const SvgdPolicy& policy,
                           const DeviceLimits& limits);

// Writes the bandwidth, one float32, bit for bit that of launch_svgd_bandwidth. `split` are the
// same particles with slots where the policy's bracket uses tensor cores, else it is not read.
// Returns the first error of the launches.
cudaError_t launch_svgd_bracket(const SvgdParticles& particles, const SplitParticles& split,
                                BandwidthRule rule, const SvgdPolicy& policy,
                                const DeviceLimits& limits, void* scratch, float* bandwidth,
                                cudaStream_t stream);

}  // namespace fused_ops
