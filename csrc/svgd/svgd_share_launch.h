// SPDX-License-Identifier: BSD-3-Clause
// The CUDA launchers of the median of pairs that several processes share (svgd_share.h).

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device_limits.h"
#include "svgd/svgd.h"
#include "svgd/svgd_share.h"
#include "svgd/svgd_tuning.h"

namespace fused_ops {

struct ShareCall {
  SvgdParticles particles;  // float32 or float64, two or more: the same in all processes
  BandwidthRule rule;
  SvgdPolicy policy;  // chosen for `share.count` shares
  DeviceLimits limits;
  PairShare share;
  void* memory;  // kept from pass to pass
};

SharePasses svgd_share_passes(const SvgdParticles& particles, const SvgdPolicy& policy);

// Bytes of the memory, 256-byte aligned.
int64_t svgd_share_bytes(const ShareCall& call);

// Writes this process's message of a pass to `sent`. `received` is the sum of all messages of the
// pass before; the first pass does not read it.
cudaError_t launch_svgd_share_pass(const ShareCall& call, int pass, const int64_t* received,
                                   int64_t* sent, cudaStream_t stream);

// The bandwidth, one element of the particles' type, from the sum of the last pass.
cudaError_t launch_svgd_share_bandwidth(const ShareCall& call, const int64_t* received,
                                        void* bandwidth, cudaStream_t stream);

}  // namespace fused_ops
