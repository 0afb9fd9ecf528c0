// SPDX-License-Identifier: BSD-3-Clause
// What the CPU and CUDA ops of triplet_margin_loss share before their kernels differ: checking
// arguments, viewing them as rows and allocating results.

#pragma once

#include <cstdint>

#include "common/tensors.h"
#include "triplet/triplet.h"

namespace fused_ops {

// The inputs as rows. The members keep alive what `inputs` points to.
struct TripletArguments {
  // Raises where the arguments are not ones that the kernels take.
  TripletArguments(const Tensor& anchor, const Tensor& positive, const Tensor& negative, double p,
                   double eps, bool swap);

  Rows anchor, positive, negative;
  TripletInputs inputs;
};

Reduction triplet_reduction(int64_t reduction);

// loss: (leading dimensions of anchor) or (); state: (rows, state_columns), empty if not wanted.
struct TripletForwardResults {
  TripletForwardResults(const Tensor& anchor, const TripletArguments& arguments,
                        Reduction reduction, bool float32_loss, bool save_state);

  Tensor loss;
  Tensor state;
};

// The upstream gradient as rows, and an (empty where not wanted) gradient for each input.
struct TripletBackwardResults {
  TripletBackwardResults(const Tensor& grad_loss, const Tensor& anchor, const Tensor& state,
                         const TripletArguments& arguments, Reduction reduction,
                         bool anchor_needs_grad, bool positive_needs_grad,
                         bool negative_needs_grad);

  Tensor grad_loss, state;
  Tensor grad_anchor, grad_positive, grad_negative;
  TripletBackward params;
};

TripletForward triplet_forward_params(const TripletArguments& arguments,
                                      const TripletForwardResults& results, double margin,
                                      Reduction reduction);

}  // namespace fused_ops
