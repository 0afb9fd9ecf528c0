// SPDX-License-Identifier: BSD-3-Clause
// From run-time types and dimensions to the template arguments of the kernels for many particles.

#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "common/device/vector.cuh"

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

// The elements of 16 and 32 bits that these kernels take.
template <typename Function>
cudaError_t dispatch_single(ScalarType type, Function&& function) {
  return dispatch_scalar(type, [&](auto* pointer) {
    if constexpr (std::is_same_v<decltype(pointer), double*>) {
      return cudaErrorInvalidValue;
    } else {
      return function(pointer);
    }
  });
}

}  // namespace fused_ops
