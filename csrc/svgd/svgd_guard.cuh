// SPDX-License-Identifier: BSD-3-Clause
// Decides on the device which form of the update a data set needs.
//
// The tensor cores form d2 = |x_i|^2 + |x_j|^2 - 2 x_i x_j around the mean m, with an error of
// about 2^-21 |x_i - m|^2 where K_ij is not small (then |x_i - m| and |x_j - m| are alike). K_ij is
// off by that over 2h, relatively, and phi_i by as much of the share that the other particles have
// in it. A row's sum of K tells that share: in a heavy tail it is nothing, in a tight cluster far
// from the mean it is all, and there the update is computed again from direct differences.

#pragma once

#include <cstdint>

namespace fused_ops {

// In device memory; filled by svgd_stream_tiles before the kernels that read it.
struct StreamState {
  int direct;         // whether the direct kernel has to write the result
  float slope;        // of the exponent of 2: K_ij = 2^(slope * y_i y_j + bias_i + bias_j)
  float value_scale;  // a power of two: what the values V were multiplied by
};

// H200, 8192 x 64: Gaussian 2e-6, Student t3 3e-6; two clusters at +-3, std 0.3, 1e-4.
constexpr float kMaxWeightError = 2e-5f;
constexpr float kDistanceError = 0x1p-21f;

// `half_norm` is |x_i - m|^2 / (2h), `weights` the sum of K_ij over j != i.
__device__ inline bool needs_direct(float half_norm, float weights) {
  return !(kDistanceError * half_norm * weights <= kMaxWeightError * (1.0f + weights));
}

}  // namespace fused_ops
