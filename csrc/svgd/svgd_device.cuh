// SPDX-License-Identifier: BSD-3-Clause
// Small things that SVGD's CUDA kernels share, whatever their form.

#pragma once

#include "svgd/svgd.h"
#include "svgd/svgd_formula.h"

namespace fused_ops {

// Non-negative floats order as their bits, their keys; those of NaN are above this one.
constexpr unsigned kInfinityKey = 0x7f800000u;

template <typename T = float>
__device__ inline T bandwidth_value(const SvgdUpdate& update) {
  return update.bandwidth != nullptr ? *static_cast<const T*>(update.bandwidth)
                                     : static_cast<T>(update.bandwidth_number);
}

// 2^x to two units in the last place in one instruction, mostly too small by half a unit; zero
// below 2^-126.
__device__ inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// K of rbf to a unit in the last place, errors of either sign alike; zero below 2^-125.
__device__ inline float accurate_weight(const KernelScale<float>& scale, float distance) {
  const float x = -scale.slope * distance;
  const float rest = -fmaf(scale.slope_rest, distance, fmaf(scale.slope, distance, x));  // of x
  constexpr float round = 0x1.8p23f;  // a sum with it has an integer in its lowest bits
  const float shifted = x + round;
  const float f = x - (shifted - round) + rest;
  float power = 1.53533590e-4f;  // of 2^f, to 2e-9 between -1/2 and 1/2
  power = fmaf(power, f, 1.33988750e-3f);
  power = fmaf(power, f, 9.61843692e-3f);
  power = fmaf(power, f, 5.55033237e-2f);
  power = fmaf(power, f, 2.40226477e-1f);
  power = fmaf(power, f, 6.93147182e-1f);
  power = fmaf(power, f, 1.0f);
  const float whole = __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);  // 2^that
  return x < -125.0f ? 0.0f : power * whole;
}

}  // namespace fused_ops
