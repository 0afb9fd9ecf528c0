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

  // Of triplet_margin_loss_indexed: embeddings (count, dim), indices (3, triplets).
  TripletArguments(const Tensor& embeddings, const Tensor& indices, double p, double eps,
                   bool swap);

  Rows anchor, positive, negative;
  TripletInputs inputs;
};

Reduction triplet_reduction(int64_t reduction);

// loss: (leading dimensions of anchor, or triplets) or (); state: one dimension, empty if not
// wanted.
struct TripletForwardResults {
  TripletForwardResults(const Tensor& anchor, const TripletArguments& arguments,
                        Reduction reduction, bool float32_loss, bool save_state);

  Tensor loss;
  Tensor state;
};

TripletForward triplet_forward_params(const TripletArguments& arguments,
                                      const TripletForwardResults& results, double margin,
                                      Reduction reduction);

// A new gradient for each input, empty where not wanted.
struct TripletGradientTensors {
  TripletGradientTensors(const Tensor& anchor, bool anchor_needs_grad, bool positive_needs_grad,
                         bool negative_needs_grad);
  TripletGradients pointers() const;

  Tensor anchor, positive, negative;
};

// The memory of gradients made earlier. Raises where one is neither empty nor like the anchor.
TripletGradients triplet_gradients(const Tensor& anchor, const Tensor& grad_anchor,
                                   const Tensor& grad_positive, const Tensor& grad_negative);

// The upstream gradient as rows, and the state. The members keep alive what `params` points to.
struct TripletBackwardArguments {
  TripletBackwardArguments(const Tensor& grad_loss, const Tensor& state, const Tensor& anchor,
                           const TripletArguments& arguments, double margin, Reduction reduction,
                           const TripletGradients& gradients);

  Tensor grad_loss, state;
  TripletBackward params;
};

}  // namespace fused_ops
