// SPDX-License-Identifier: BSD-3-Clause
// The CUDA launchers of the SVGD update: a policy's kernels on a stream.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "svgd/svgd.h"
#include "svgd/svgd_tuning.h"

namespace fused_ops {

// `rows` is how many results are wanted, `shares` among how many processes the median's pairs are
// divided.
SvgdPolicy svgd_policy(const SvgdParticles& particles, int64_t rows, int shares,
                       const DeviceLimits& limits);

// Bytes of scratch memory for each part; all may be one allocation, 16-byte aligned.
int64_t svgd_distances_bytes(const SvgdParticles& particles);
int64_t svgd_median_bytes(const SvgdPolicy& policy);
int64_t svgd_partial_bytes(const SvgdUpdate& update, const SvgdPolicy& policy);

// Each returns the first error of its launches.
cudaError_t launch_svgd_distances(const SvgdParticles& particles, void* distances,
                                  cudaStream_t stream);

// Writes the bandwidth of two particles or more, one element of the accumulation type, and on the
// way fills `distances`, (count, count) on and above the diagonal, unless that is null.
cudaError_t launch_svgd_bandwidth(const SvgdParticles& particles, BandwidthRule rule,
                                  const SvgdPolicy& policy, void* distances, void* scratch,
                                  void* bandwidth, cudaStream_t stream);

// `distances` is a matrix filled on and above the diagonal, or null: then they are computed, as
// they have to be where not all rows are wanted.
cudaError_t launch_svgd_update(const SvgdUpdate& update, const SvgdPolicy& policy,
                               const void* distances, void* partial, cudaStream_t stream);

}  // namespace fused_ops
