// SPDX-License-Identifier: BSD-3-Clause
// The op behind batch_triplet_loss. `batch_triplet.h` says what it computes.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, library) {
  // Without references the embeddings are their own. Numbers of mining, distance and reduction are
  // those of batch_triplet.h. Gradients are in the accumulation type and of the loss for an
  // upstream gradient of 1, or with `weights` (A) of the sum of the anchors' losses times these;
  // unwanted they are empty. That of the references is empty without references.
  library.def(
      "batch_triplet(Tensor embeddings, Tensor labels, Tensor? references, "
      "Tensor reference_labels, Tensor? weights, int first_own, float margin, int mining, "
      "int distance, int reduction, bool soft, bool embeddings_grad, bool references_grad) "
      "-> (Tensor loss, Tensor totals, Tensor grad_embeddings, Tensor grad_references)");
}
