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

// Of the type that kernels accumulate `type` in: float32, or float64 for float64.
constexpr int accumulate_size(ScalarType type) { return type == ScalarType::float64 ? 8 : 4; }

}  // namespace fused_ops
