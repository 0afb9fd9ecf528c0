// SPDX-License-Identifier: BSD-3-Clause
// The CUDA launchers of triplet_margin_loss: a policy's kernel on a stream.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device_limits.h"
#include "triplet/triplet.h"
#include "triplet/triplet_tuning.h"

namespace fused_ops {

TripletPolicy triplet_policy(const TripletInputs& inputs, const DeviceLimits& limits,
                             TripletForm form);

// Bytes of scratch memory that the forward needs under `policy`.
int64_t triplet_forward_scratch_bytes(const TripletForward& params, const TripletPolicy& policy);

// Each returns the first error of its launch. `scratch` is 16-byte aligned. The forward forms
// `gradients` from what is remembered at place `guess` (triplet_guess.h), or none where that is 0.
cudaError_t launch_triplet_forward(const TripletForward& params, const TripletPolicy& policy,
                                   const TripletGradients& gradients, int guess, void* scratch,
                                   cudaStream_t stream);

// `header` is that of the state where the forward may have formed the gradients, or else null.
cudaError_t launch_triplet_backward(const TripletBackward& params, const TripletPolicy& policy,
                                    const TripletStateHeader* header, cudaStream_t stream);

}  // namespace fused_ops
