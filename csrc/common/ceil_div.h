// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace fused_ops {

// a / b rounded up, for a >= 0 and b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fused_ops
