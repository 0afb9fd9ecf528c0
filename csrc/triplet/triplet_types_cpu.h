// SPDX-License-Identifier: BSD-3-Clause
// From what the params of a CPU kernel hold at run time to types.

#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/cpu_scalar.h"
#include "triplet/triplet.h"

namespace fused_ops {

template <typename scalar>
using CpuAccumulate = std::conditional_t<std::is_same_v<scalar, double>, double, float>;

// Calls `function` with a null pointer of the element type and, as a type, the norm.
template <typename Function>
auto dispatch_on_cpu(const TripletInputs& in, Function&& function) {
  return dispatch_scalar(in.type, [&](auto* scalar) {
    return dispatch_norm(in.norm, [&](auto norm) { return function(scalar, norm); });
  });
}

// The upstream gradient of a row's loss.
template <typename scalar, typename T>
T upstream_gradient(const TripletBackward& params, int64_t row) {
  const int64_t index = row * params.grad_loss_stride;
  const T gradient = params.accumulate_loss
                         ? static_cast<const T*>(params.grad_loss)[index]
                         : static_cast<T>(static_cast<const scalar*>(params.grad_loss)[index]);
  return params.reduction == Reduction::mean ? gradient / static_cast<T>(params.inputs.rows)
                                             : gradient;
}

}  // namespace fused_ops
