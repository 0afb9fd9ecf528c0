// SPDX-License-Identifier: BSD-3-Clause
// The CUDA launchers of batch_triplet_loss. batch_triplet_run.h says what each computes.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "batch_triplet/batch_triplet.h"

namespace fused_ops {

// Positives of an anchor that are sorted at a time, in shared memory. Where there may be more,
// chunks need scratch memory for what negatives add up over the pieces.
constexpr int kMostPositives = 1024;

// `centre` is memory for `dim` elements of the accumulation type.
cudaError_t launch_batch_prepare(const BatchTriplet& call, void* centre, cudaStream_t stream);
cudaError_t launch_batch_mine(const BatchTriplet& call, const BatchChunk& chunk,
                              cudaStream_t stream);
cudaError_t launch_batch_symmetrise(const BatchTriplet& call, void* coefficients,
                                    cudaStream_t stream);
cudaError_t launch_batch_add(const BatchTriplet& call, void* into, const void* values,
                             int64_t count, cudaStream_t stream);
cudaError_t launch_batch_reduce(const BatchTriplet& call, const BatchTotals* anchors,
                                BatchReduction reduction, void* loss, double* totals, double* scale,
                                cudaStream_t stream);
cudaError_t launch_batch_gradient(const BatchTriplet& call, const BatchGradient& gradient,
                                  cudaStream_t stream);
cudaError_t launch_batch_hard_gradient(const BatchTriplet& call, const HardGradient& gradient,
                                       cudaStream_t stream);

}  // namespace fused_ops
