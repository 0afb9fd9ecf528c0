// SPDX-License-Identifier: BSD-3-Clause
// The CUDA launchers of triplet_margin_loss_indexed: a policy's kernels on a stream.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "triplet/triplet_indexed.h"
#include "triplet/triplet_indexed_tuning.h"

namespace fused_ops {

// `forced_share` as in choose_triplet_indexed_policy.
TripletIndexedPolicy triplet_indexed_policy(const TripletInputs& inputs, int multiprocessors,
                                            int64_t forced_share);

// Bytes of scratch memory, 256-byte aligned, that a launch needs.
int64_t triplet_indexed_forward_bytes(const TripletForward& params,
                                      const TripletIndexedPolicy& policy);
int64_t triplet_indexed_backward_bytes(const TripletInputs& inputs,
                                       const TripletIndexedPolicy& policy);

// Each returns the first error of its launches. The order is that of TripletIndexedBackward, and
// `unsorted` has its size; without scratch memory it only says how many bytes that needs.
cudaError_t launch_triplet_indexed_order(const TripletInputs& inputs, uint64_t* unsorted,
                                         uint64_t* order, void* scratch, size_t& scratch_bytes,
                                         cudaStream_t stream);
cudaError_t launch_triplet_indexed_forward(const TripletForward& params,
                                           const TripletIndexedPolicy& policy, void* scratch,
                                           cudaStream_t stream);
cudaError_t launch_triplet_indexed_backward(const TripletIndexedBackward& params,
                                            const TripletIndexedPolicy& policy, void* scratch,
                                            cudaStream_t stream);

}  // namespace fused_ops
