// SPDX-License-Identifier: BSD-3-Clause
// Small things that SVGD's CUDA kernels share, whatever their form.

#pragma once

#include "svgd/svgd.h"

namespace fused_ops {

// Non-negative floats order as their bits, their keys; those of NaN are above this one.
constexpr unsigned kInfinityKey = 0x7f800000u;

template <typename T = float>
__device__ inline T bandwidth_value(const SvgdUpdate& update) {
  return update.bandwidth != nullptr ? *static_cast<const T*>(update.bandwidth)
                                     : static_cast<T>(update.bandwidth_number);
}

// 2^x to two units in the last place in one instruction, zero below 2^-126.
__device__ inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace fused_ops
