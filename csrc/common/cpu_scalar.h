// SPDX-License-Identifier: BSD-3-Clause
// From an element type at run time to one at compile time, for CPU kernels.

#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "common/scalar_type.h"

namespace fused_ops {

// Calls `function` with a null pointer of the C++ type that `type` stands for.
template <typename Function>
auto dispatch_scalar(ScalarType type, Function&& function) {
  switch (type) {
    case ScalarType::float16:
      return function(static_cast<c10::Half*>(nullptr));
    case ScalarType::bfloat16:
      return function(static_cast<c10::BFloat16*>(nullptr));
    case ScalarType::float32:
      return function(static_cast<float*>(nullptr));
    default:
      return function(static_cast<double*>(nullptr));
  }
}

}  // namespace fused_ops
