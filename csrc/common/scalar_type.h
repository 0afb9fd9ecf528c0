// SPDX-License-Identifier: BSD-3-Clause
// The element types that kernels are compiled for, named without a torch header.

#pragma once

#include <cstdint>

namespace fused_ops {

enum class ScalarType : int8_t { float16, bfloat16, float32, float64 };
constexpr const char* kScalarTypeNames[] = {"float16", "bfloat16", "float32", "float64"};

constexpr int element_size(ScalarType type) {
  return type == ScalarType::float64 ? 8 : type == ScalarType::float32 ? 4 : 2;
}

}  // namespace fused_ops
