// SPDX-License-Identifier: BSD-3-Clause
// The CUDA launcher of many small independent problems.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "svgd/svgd.h"

namespace fused_ops {

// Whether a block's shared memory, `shared_bytes` of it, holds a problem. `particles` are those of
// one, in float32 or float64.
bool svgd_batch_takes(const SvgdParticles& particles, int shared_bytes);

// Writes the results of `problems` problems, of which `first` is the first, in the layout of
// nth_problem. With a `rule` the bandwidths are its. `bandwidths` receives one element of the
// particles' type for each problem, or is null; without a result only they are found. Returns the
// first error of the launch.
cudaError_t launch_svgd_batch(const SvgdUpdate& first, int64_t problems, const BandwidthRule* rule,
                              void* bandwidths, cudaStream_t stream);

}  // namespace fused_ops
