// SPDX-License-Identifier: BSD-3-Clause
// The CUDA launcher of the SVGD update of many particles, bandwidth known: on tensor cores where
// the device, the precision and the data allow it, else from direct differences.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "svgd/svgd.h"
#include "svgd/svgd_split.h"
#include "svgd/svgd_tuning.h"

namespace fused_ops {

// Bytes of scratch, 256-byte aligned.
int64_t svgd_stream_bytes(const SvgdUpdate& update, const SplitParticles& split,
                          const StreamPolicy& policy);

// Particles in float32, at least one particle and dimension. `split` is the
// split of the same particles, with slots where `policy` is for tensor cores. The update's score
// and result are as in svgd.h. Returns the first error of the launches.
cudaError_t launch_svgd_stream(const SvgdUpdate& update, const SplitParticles& split,
                               const StreamPolicy& policy, void* scratch, cudaStream_t stream);

}  // namespace fused_ops
