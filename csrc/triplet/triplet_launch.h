// SPDX-License-Identifier: BSD-3-Clause
// The CUDA launchers of triplet_margin_loss: a policy's kernels on a stream.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "triplet/triplet.h"
#include "triplet/triplet_tuning.h"

namespace fused_ops {

// The policies. Rows are read through vector accesses where their alignment allows.
TripletPolicy triplet_policy(const TripletForward& params, int multiprocessors, TripletForm form);
TripletPolicy triplet_policy(const TripletBackward& params, int multiprocessors, TripletForm form);

// Bytes of scratch memory that the forward needs under `policy`.
int64_t triplet_forward_scratch_bytes(const TripletForward& params, const TripletPolicy& policy);

// Each returns the first error of its launches. `scratch` is 16-byte aligned.
cudaError_t launch_triplet_forward(const TripletForward& params, const TripletPolicy& policy,
                                   void* scratch, cudaStream_t stream);
cudaError_t launch_triplet_backward(const TripletBackward& params, const TripletPolicy& policy,
                                    cudaStream_t stream);

}  // namespace fused_ops
