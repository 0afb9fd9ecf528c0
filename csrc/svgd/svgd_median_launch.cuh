// SPDX-License-Identifier: BSD-3-Clause
// Launches of the radix passes of the median (svgd_median_kernel.cuh), for all that count pairs.

#pragma once

#include "common/memory_parts.h"
#include "svgd/svgd_median_kernel.cuh"
#include "svgd/svgd_tuning.h"

namespace fused_ops {

constexpr int svgd_digits(ScalarType type) {
  return type == ScalarType::float64 ? DistanceKey<double>::digits : DistanceKey<float>::digits;
}

// A task in scratch memory, without distances or a place for the bandwidth.
MedianTask make_median_task(const SvgdParticles& particles, BandwidthRule rule,
                            const SvgdPolicy& policy, MemoryParts& parts);

// All passes: the bandwidth from this process alone.
cudaError_t launch_svgd_median(const MedianTask& task, const SvgdPolicy& policy,
                               cudaStream_t stream);

// Counts one digit of the task's share of the pairs.
cudaError_t launch_svgd_digit(const MedianTask& task, const SvgdPolicy& policy, int digit,
                              cudaStream_t stream);

// Where the median is a mean of two.
cudaError_t launch_svgd_next_above(const MedianTask& task, const SvgdPolicy& policy,
                                   cudaStream_t stream);

}  // namespace fused_ops
