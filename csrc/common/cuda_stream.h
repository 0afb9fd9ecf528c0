// SPDX-License-Identifier: BSD-3-Clause
// The stream that torch has current on a device.

#pragma once

#include <cstdint>

namespace fused_ops {

// Returns a cudaStream_t. Raises where this torch has no CUDA, and never gives the default stream
// in place of the current one.
void* current_cuda_stream(int32_t device);

}  // namespace fused_ops
