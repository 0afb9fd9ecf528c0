// SPDX-License-Identifier: BSD-3-Clause
// The ops behind triplet_margin_loss_indexed. `triplet.h` and `triplet_indexed.h` say what each
// argument and result is. `share` forces how many entries a group of threads takes on CUDA, for
// tests.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, library) {
  library.def(
      "triplet_indexed_forward(Tensor embeddings, Tensor indices, float margin, float p, "
      "float eps, bool swap, int reduction, bool float32_loss, bool save_state) "
      "-> (Tensor loss, Tensor state)");
  library.def(
      "triplet_indexed_backward(Tensor grad_loss, Tensor embeddings, Tensor indices, "
      "Tensor state, float margin, float p, float eps, bool swap, int reduction, int share=0) "
      "-> Tensor grad_embeddings");
}
