// SPDX-License-Identifier: BSD-3-Clause
// The CUDA ops: arguments, allocation, device guard, current stream, launch.

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>

#include "common/cuda_launch.h"
#include "triplet/triplet_arguments.h"
#include "triplet/triplet_launch.h"

namespace fused_ops {
namespace {

TripletForm checked_form(int64_t form) {
  STD_TORCH_CHECK(form >= -1 && form < kTripletFormCount, "form: expected -1 to ",
                  kTripletFormCount - 1, ", got ", form);
  return static_cast<TripletForm>(form);
}

std::tuple<Tensor, Tensor> triplet_forward(Tensor anchor, Tensor positive, Tensor negative,
                                           double margin, double p, double eps, bool swap,
                                           int64_t reduction_, bool float32_loss, bool save_state,
                                           int64_t form) {
  const CudaContext context(anchor);
  const Reduction reduction = triplet_reduction(reduction_);
  const TripletArguments arguments(anchor, positive, negative, p, eps, swap);
  TripletForwardResults results(anchor, arguments, reduction, float32_loss, save_state);
  const TripletForward params = triplet_forward_params(arguments, results, margin, reduction);
  const TripletPolicy policy =
      triplet_policy(params, context.multiprocessors(), checked_form(form));

  Tensor scratch;
  void* scratch_data = nullptr;
  if (const int64_t bytes = triplet_forward_scratch_bytes(params, policy)) {
    scratch = new_tensor(anchor, {bytes}, torch::headeronly::ScalarType::Byte);
    scratch_data = scratch.mutable_data_ptr();
  }
  check_cuda(launch_triplet_forward(params, policy, scratch_data, context.stream));
  return {results.loss, results.state};
}

std::tuple<Tensor, Tensor, Tensor> triplet_backward(Tensor grad_loss, Tensor anchor,
                                                    Tensor positive, Tensor negative, Tensor state,
                                                    double p, double eps, bool swap,
                                                    int64_t reduction_, bool anchor_needs_grad,
                                                    bool positive_needs_grad,
                                                    bool negative_needs_grad, int64_t form) {
  const CudaContext context(anchor);
  const Reduction reduction = triplet_reduction(reduction_);
  const TripletArguments arguments(anchor, positive, negative, p, eps, swap);
  const TripletBackwardResults results(grad_loss, anchor, state, arguments, reduction,
                                       anchor_needs_grad, positive_needs_grad, negative_needs_grad);
  const TripletPolicy policy =
      triplet_policy(results.params, context.multiprocessors(), checked_form(form));
  check_cuda(launch_triplet_backward(results.params, policy, context.stream));
  return {results.grad_anchor, results.grad_positive, results.grad_negative};
}

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, library) {
  library.impl("triplet_forward", TORCH_BOX(&fused_ops::triplet_forward));
  library.impl("triplet_backward", TORCH_BOX(&fused_ops::triplet_backward));
}
