// SPDX-License-Identifier: BSD-3-Clause
#include "triplet/triplet_indexed_arguments.h"

#include <torch/headeronly/util/Exception.h>

namespace fused_ops {

TripletIndexedBackwardArguments::TripletIndexedBackwardArguments(
    const Tensor& grad_loss, const Tensor& embeddings, const Tensor& indices, const Tensor& state,
    double margin, double p, double eps, bool swap, int64_t reduction)
    : arguments(embeddings, indices, p, eps, swap),
      backward(grad_loss, state, embeddings, arguments, margin, triplet_reduction(reduction), {}),
      gradient(new_tensor(embeddings, {embeddings.size(0), embeddings.size(1)},
                          embeddings.scalar_type())),
      params{backward.params, TripletEntryBits(arguments.inputs), nullptr,
             gradient.mutable_data_ptr()} {
  STD_TORCH_CHECK(params.bits.row + params.bits.entry <= 64,
                  "indices: expected fewer for so many embeddings, got ", indices.numel());
}

}  // namespace fused_ops
