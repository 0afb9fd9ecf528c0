// SPDX-License-Identifier: BSD-3-Clause
// From run-time types and dimensions to the template arguments of the kernels for many particles.

#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "common/scalar_type.h"

namespace fused_ops {

// padded_dim of SplitParticles, up to kMostTensorDim.
template <typename Function>
void dispatch_padded_dim(int padded_dim, Function&& function) {
  switch (padded_dim) {
    case 16:
      return function(std::integral_constant<int, 16>{});
    case 32:
      return function(std::integral_constant<int, 32>{});
    case 64:
      return function(std::integral_constant<int, 64>{});
    case 128:
      return function(std::integral_constant<int, 128>{});
    case 192:
      return function(std::integral_constant<int, 192>{});
    default:
      return function(std::integral_constant<int, 256>{});
  }
}

// Calls `function` with a null pointer of float or double; 16-bit elements are cast (svgd_cast.h).
template <typename Function>
cudaError_t dispatch_wide(ScalarType type, Function&& function) {
  if (type == ScalarType::float32) return function(static_cast<float*>(nullptr));
  if (type == ScalarType::float64) return function(static_cast<double*>(nullptr));
  return cudaErrorInvalidValue;
}

}  // namespace fused_ops
