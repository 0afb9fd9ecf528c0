// SPDX-License-Identifier: BSD-3-Clause
#include "triplet/triplet_arguments.h"

#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <optional>
#include <vector>

#include "triplet/triplet_limits.h"

namespace fused_ops {
namespace {

void check_like_anchor(const Tensor& tensor, const Tensor& anchor, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == anchor.scalar_type(), name,
                  ": expected the dtype of anchor, ", toString(anchor.scalar_type()), ", got ",
                  toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.device() == anchor.device(), name, ": expected the device of anchor");
  STD_TORCH_CHECK(tensor.dim() == anchor.dim(), name, ": expected ", anchor.dim(),
                  " dimensions as anchor has, got ", tensor.dim());
  for (int64_t d = 0; d < anchor.dim(); ++d) {
    STD_TORCH_CHECK(tensor.size(d) == anchor.size(d), name, ": expected size ", anchor.size(d),
                    " in dimension ", d, " as anchor has, got ", tensor.size(d));
  }
}

const Tensor& checked(const Tensor& anchor) {
  STD_TORCH_CHECK(anchor.dim() >= 1 && anchor.numel() > 0,
                  "anchor: expected at least one dimension and one element");
  return anchor;
}

const Tensor& checked_embeddings(const Tensor& embeddings) {
  STD_TORCH_CHECK(embeddings.dim() == 2 && embeddings.numel() > 0,
                  "embeddings: expected two dimensions and one element at least");
  return embeddings;
}

TripletInputs inputs_of(const TripletArguments& arguments, const char* name, double p, double eps,
                        bool swap) {
  const Rows& anchor = arguments.anchor;
  const std::optional<Norm> norm = triplet_norm(p);
  STD_TORCH_CHECK(norm, "p: expected 1, 2 or inf, got ", p);
  // Of a single element torch takes the absolute value, which cannot overflow as a square can.
  const bool single = anchor.dim == 1 && *norm == Norm::two;
  return {kernel_scalar_type(anchor.tensor, name),
          single ? Norm::one : *norm,
          single,
          swap,
          eps,
          anchor.count,
          anchor.dim,
          anchor.tensor.const_data_ptr(),
          arguments.positive.tensor.const_data_ptr(),
          arguments.negative.tensor.const_data_ptr(),
          anchor.stride,
          arguments.positive.stride,
          arguments.negative.stride,
          nullptr,
          0};
}

Tensor gradient_like(const Tensor& anchor, bool wanted) {
  std::vector<int64_t> sizes{0};
  if (wanted) sizes.assign(anchor.sizes().begin(), anchor.sizes().end());
  return new_tensor(anchor, sizes, anchor.scalar_type());
}

void* data_or_null(const Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr();
}

int64_t state_elements(const TripletInputs& in) {
  return static_cast<int64_t>(sizeof(TripletStateHeader)) / accumulate_size(in.type) +
         in.rows * state_columns(in.norm, in.swap);
}

char* rows_behind_header(void* state) {
  return state == nullptr ? nullptr : static_cast<char*>(state) + sizeof(TripletStateHeader);
}

}  // namespace

TripletArguments::TripletArguments(const Tensor& a, const Tensor& p_, const Tensor& n, double p,
                                   double eps, bool swap)
    : anchor(checked(a)),
      positive((check_like_anchor(p_, a, "positive"), p_)),
      negative((check_like_anchor(n, a, "negative"), n)),
      inputs(inputs_of(*this, "anchor", p, eps, swap)) {}

TripletArguments::TripletArguments(const Tensor& embeddings, const Tensor& indices, double p,
                                   double eps, bool swap)
    : anchor(checked_embeddings(embeddings)),
      positive(anchor),
      negative(anchor),
      inputs(inputs_of(*this, "embeddings", p, eps, swap)) {
  STD_TORCH_CHECK(indices.scalar_type() == torch::headeronly::ScalarType::Long &&
                      indices.device() == embeddings.device() && indices.is_contiguous(),
                  "indices: expected a contiguous int64 tensor on the device of embeddings");
  STD_TORCH_CHECK(indices.dim() == 2 && indices.size(0) == 3 && indices.size(1) > 0,
                  "indices: expected (3, triplets), at least one");
  inputs.rows = indices.size(1);
  inputs.indices = static_cast<const int64_t*>(indices.const_data_ptr());
  inputs.embeddings = anchor.count;
}

Reduction triplet_reduction(int64_t reduction) {
  STD_TORCH_CHECK(reduction >= 0 && reduction <= 2,
                  "reduction: expected 0 (none), 1 (mean) or 2 (sum), got ", reduction);
  return static_cast<Reduction>(reduction);
}

TripletForwardResults::TripletForwardResults(const Tensor& a, const TripletArguments& arguments,
                                             Reduction reduction, bool float32_loss,
                                             bool save_state) {
  const TripletInputs& in = arguments.inputs;
  const torch::headeronly::ScalarType accumulate = accumulate_dtype(in.type);
  std::vector<int64_t> sizes;
  if (reduction == Reduction::none) sizes.assign(a.sizes().begin(), a.sizes().end() - 1);
  if (reduction == Reduction::none && in.indices != nullptr) sizes.assign({in.rows});
  loss = new_tensor(a, sizes, float32_loss ? accumulate : a.scalar_type());
  sizes.assign({save_state ? state_elements(in) : 0});
  state = new_tensor(a, sizes, accumulate);
}

TripletForward triplet_forward_params(const TripletArguments& arguments,
                                      const TripletForwardResults& results, double margin,
                                      Reduction reduction) {
  void* state = data_or_null(results.state);
  return {arguments.inputs,
          margin,
          reduction,
          results.loss.scalar_type() == results.state.scalar_type(),
          results.loss.mutable_data_ptr(),
          static_cast<TripletStateHeader*>(state),
          rows_behind_header(state)};
}

TripletGradientTensors::TripletGradientTensors(const Tensor& like, bool anchor_needs_grad,
                                               bool positive_needs_grad, bool negative_needs_grad)
    : anchor(gradient_like(like, anchor_needs_grad)),
      positive(gradient_like(like, positive_needs_grad)),
      negative(gradient_like(like, negative_needs_grad)) {}

TripletGradients TripletGradientTensors::pointers() const {
  return {data_or_null(anchor), data_or_null(positive), data_or_null(negative)};
}

TripletGradients triplet_gradients(const Tensor& anchor, const Tensor& grad_anchor,
                                   const Tensor& grad_positive, const Tensor& grad_negative) {
  for (const Tensor* gradient : {&grad_anchor, &grad_positive, &grad_negative}) {
    if (gradient->numel() == 0) continue;
    check_like_anchor(*gradient, anchor, "gradient");
    STD_TORCH_CHECK(gradient->is_contiguous(), "gradient: expected a contiguous tensor");
  }
  return {data_or_null(grad_anchor), data_or_null(grad_positive), data_or_null(grad_negative)};
}

TripletBackwardArguments::TripletBackwardArguments(const Tensor& upstream,
                                                   const Tensor& forward_state,
                                                   const Tensor& anchor,
                                                   const TripletArguments& arguments, double margin,
                                                   Reduction reduction,
                                                   const TripletGradients& gradients)
    : grad_loss(upstream), state(forward_state) {
  const TripletInputs& in = arguments.inputs;
  STD_TORCH_CHECK(state.scalar_type() == accumulate_dtype(in.type) &&
                      state.device() == anchor.device() && state.is_contiguous() &&
                      state.numel() == state_elements(in),
                  "state: expected the second result of triplet_forward on the same inputs");
  const int64_t expected = reduction == Reduction::none ? in.rows : 1;
  STD_TORCH_CHECK(upstream.numel() == expected && upstream.device() == anchor.device(),
                  "grad_loss: expected the shape and device of the loss, ", expected,
                  " elements, got ", upstream.numel());
  STD_TORCH_CHECK(upstream.scalar_type() == anchor.scalar_type() ||
                      upstream.scalar_type() == accumulate_dtype(in.type),
                  "grad_loss: expected the dtype of the loss");
  int64_t stride = 0;
  if (expected > 1) {
    // As one column, so that an expanded gradient (stride 0) is read as it is.
    const Rows column(torch::stable::unsqueeze(upstream, -1));
    grad_loss = column.tensor;
    stride = column.stride;
  }
  const void* header = state.const_data_ptr();
  params = {in,
            margin,
            reduction,
            upstream.scalar_type() == accumulate_dtype(in.type),
            grad_loss.const_data_ptr(),
            stride,
            static_cast<const char*>(header) + sizeof(TripletStateHeader),
            gradients};
}

}  // namespace fused_ops
