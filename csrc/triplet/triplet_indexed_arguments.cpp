// SPDX-License-Identifier: BSD-3-Clause
#include "triplet/triplet_indexed_arguments.h"

#include <torch/headeronly/util/Exception.h>

namespace fused_ops {

TripletIndexedBackwardArguments::TripletIndexedBackwardArguments(
    const Tensor& grad_loss, const Tensor& embeddings, const Tensor& indices, const Tensor& state,
    const Tensor& order, double margin, double p, double eps, bool swap, int64_t reduction)
    : arguments(embeddings, indices, p, eps, swap),
      backward(grad_loss, state, embeddings, arguments, margin, triplet_reduction(reduction), {}),
      gradient(new_tensor(embeddings, {embeddings.size(0), embeddings.size(1)},
                          embeddings.scalar_type())),
      params{backward.params, nullptr, gradient.mutable_data_ptr()} {
  STD_TORCH_CHECK(order.scalar_type() == torch::headeronly::ScalarType::Long &&
                      order.device() == embeddings.device() && order.is_contiguous() &&
                      order.numel() == indices.numel(),
                  "order: expected a contiguous int64 tensor of ", indices.numel(),
                  " entries on the device of embeddings");
  params.order = static_cast<const int64_t*>(order.const_data_ptr());
}

}  // namespace fused_ops
