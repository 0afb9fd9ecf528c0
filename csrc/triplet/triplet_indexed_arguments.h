// SPDX-License-Identifier: BSD-3-Clause
// What the CPU and CUDA ops of triplet_margin_loss_indexed share beyond triplet_arguments.h.

#pragma once

#include <cstdint>

#include "triplet/triplet_arguments.h"
#include "triplet/triplet_indexed.h"

namespace fused_ops {

// The members keep alive what `params` points to.
struct TripletIndexedBackwardArguments {
  TripletIndexedBackwardArguments(const Tensor& grad_loss, const Tensor& embeddings,
                                  const Tensor& indices, const Tensor& state, double margin,
                                  double p, double eps, bool swap, int64_t reduction);

  TripletArguments arguments;
  TripletBackwardArguments backward;
  Tensor gradient;                // like embeddings, not yet written
  TripletIndexedBackward params;  // without the order
};

}  // namespace fused_ops
