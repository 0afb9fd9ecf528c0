// SPDX-License-Identifier: BSD-3-Clause
// 16-bit particles on CUDA: the kernels take float32 and float64, and these casts stand around
// them. They move N * dim elements, against the N * N distances of all else.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/scalar_type.h"

namespace fused_ops {

// Writes the float16 or bfloat16 matrix (count, dim), rows `stride` apart, to `wide`, contiguous.
cudaError_t launch_svgd_widen(ScalarType type, const void* matrix, int64_t count, int64_t dim,
                              int64_t stride, float* wide, cudaStream_t stream);

// Rounds `size` elements to float16 or bfloat16.
cudaError_t launch_svgd_narrow(ScalarType type, const float* wide, int64_t size, void* result,
                               cudaStream_t stream);

}  // namespace fused_ops
