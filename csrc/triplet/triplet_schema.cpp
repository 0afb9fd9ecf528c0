// SPDX-License-Identifier: BSD-3-Clause
// The ops behind triplet_margin_loss. `triplet.h` says what each argument and result is.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, library) {
  library.def(
      "triplet_forward(Tensor anchor, Tensor positive, Tensor negative, float margin, float p, "
      "float eps, bool swap, int reduction, bool float32_loss, bool save_state, int form=-1) "
      "-> (Tensor loss, Tensor state)");
  library.def(
      "triplet_backward(Tensor grad_loss, Tensor anchor, Tensor positive, Tensor negative, "
      "Tensor state, float margin, float p, float eps, bool swap, int reduction, "
      "bool anchor_needs_grad, bool positive_needs_grad, bool negative_needs_grad, int form=-1) "
      "-> (Tensor grad_anchor, Tensor grad_positive, Tensor grad_negative)");
  // CUDA only. The first op leaves gradients that the second completes, for both may form them: the
  // first where it guesses the upstream gradient, the second where that guess was missing or wrong.
  library.def(
      "triplet_forward_with_gradients(Tensor anchor, Tensor positive, Tensor negative, "
      "float margin, float p, float eps, bool swap, int reduction, bool float32_loss, "
      "bool anchor_needs_grad, bool positive_needs_grad, bool negative_needs_grad, int form=-1) "
      "-> (Tensor loss, Tensor state, Tensor grad_anchor, Tensor grad_positive, "
      "Tensor grad_negative)");
  library.def(
      "triplet_correct_gradients(Tensor grad_loss, Tensor anchor, Tensor positive, "
      "Tensor negative, Tensor state, float margin, float p, float eps, bool swap, int reduction, "
      "Tensor(a!) grad_anchor, Tensor(b!) grad_positive, Tensor(c!) grad_negative, int form=-1) "
      "-> ()");
}
