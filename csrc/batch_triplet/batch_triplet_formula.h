// SPDX-License-Identifier: BSD-3-Clause
// The formulas of batch_triplet_loss that CPU and CUDA kernels share.

#pragma once

#include <cmath>

#include "batch_triplet/batch_triplet.h"
#include "common/clones.h"
#include "common/host_device.h"

namespace fused_ops {

// Below this share of the squared norms a squared distance is formed from differences: of the 24
// bits of a float 8 are lost there, and as many in the product's sum.
constexpr double kNearShare = 1.0 / 256;

// |x|^2 + |y|^2 - 2 x y; `near` where cancellation took its digits, or where it is no number.
template <typename T>
FUSED_OPS_HOST_DEVICE FUSED_OPS_INLINE T squared_from_product(T product, T norm_x, T norm_y,
                                                              bool& near) {
  const T norms = norm_x + norm_y;
  const T squared = norms - 2 * product;
  near = !(squared > static_cast<T>(kNearShare) * norms) || !(squared - squared == 0);
  return squared;
}

template <typename T>
FUSED_OPS_HOST_DEVICE inline T distance_from_squared(T squared, BatchDistance distance) {
  if (distance == BatchDistance::euclidean) return std::sqrt(squared);
  return distance == BatchDistance::squared ? squared : squared / 2;
}

// c of a pair from its d and dL/dd. Equal rows have none, whatever the loss.
template <typename T>
FUSED_OPS_HOST_DEVICE inline T pair_coefficient(T gradient, T d, BatchDistance distance) {
  if (distance == BatchDistance::euclidean) return d == 0 ? T(0) : gradient / d;
  return distance == BatchDistance::squared ? 2 * gradient : gradient;
}

template <typename T>
struct ItemLoss {
  T loss;
  T weight;  // its derivative
};

// Of x = d_ip - d_in + margin, which is NaN for two infinite distances.
template <typename T>
FUSED_OPS_HOST_DEVICE inline ItemLoss<T> item_loss(T x, bool soft) {
  if (soft) {
    const T decay = std::exp(x > 0 ? -x : x);
    return {(x > 0 ? x : T(0)) + std::log1p(decay), (x > 0 ? T(1) : decay) / (1 + decay)};
  }
  return x <= 0 ? ItemLoss<T>{T(0), T(0)} : ItemLoss<T>{x, T(1)};
}

// The loss of "all" from what its counts make of the distances, which does not see an infinite one
// less another. The margin, in the type of the distances, comes in here: added to each of them it
// would be rounded to their last place, always in the same direction.
FUSED_OPS_HOST_DEVICE inline double counted_loss(const BatchTotals& totals, double margin) {
  if (std::isinf(totals.positive_sum) && std::isinf(totals.negative_sum)) {
    return totals.positive_sum - totals.negative_sum;
  }
  return totals.active > 0 ? totals.loss + totals.active * margin : totals.loss;
}

// What the sum of the losses is multiplied with.
FUSED_OPS_HOST_DEVICE inline double loss_scale(const BatchTotals& totals,
                                               BatchReduction reduction) {
  const double count = reduction == BatchReduction::mean          ? totals.items
                       : reduction == BatchReduction::mean_active ? totals.active
                                                                  : 1;
  return count > 0 ? 1 / count : 1;
}

}  // namespace fused_ops
