// SPDX-License-Identifier: BSD-3-Clause
// What the kernels of triplet_margin_loss take, written once: the ops check against it, and the
// Python layer reads it to decide beforehand. The element types are those of ScalarType.

#pragma once

#include <limits>
#include <optional>

#include "triplet/triplet.h"

namespace fused_ops {

constexpr double kTripletNorms[] = {1, 2, std::numeric_limits<double>::infinity()};  // as Norm

inline std::optional<Norm> triplet_norm(double p) {
  for (int i = 0; i < 3; ++i) {
    if (p == kTripletNorms[i]) return static_cast<Norm>(i);
  }
  return std::nullopt;
}

}  // namespace fused_ops
