// SPDX-License-Identifier: BSD-3-Clause
// The CUDA ops: arguments, allocation, device guard, current stream, launch.

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>

#include "common/cuda_launch.h"
#include "triplet/triplet_arguments.h"
#include "triplet/triplet_guess.h"
#include "triplet/triplet_launch.h"

namespace fused_ops {
namespace {

TripletForm checked_form(int64_t form) {
  STD_TORCH_CHECK(form >= -1 && form < kTripletFormCount, "form: expected -1 to ",
                  kTripletFormCount - 1, ", got ", form);
  return static_cast<TripletForm>(form);
}

// The forward with gradients where those have memory; a wanted one has.
TripletForwardResults run_forward(const Tensor& anchor, const TripletArguments& arguments,
                                  double margin, Reduction reduction, bool float32_loss,
                                  bool save_state, const TripletGradients& gradients, bool guesses,
                                  int64_t form) {
  const CudaContext context(anchor);
  TripletForwardResults results(anchor, arguments, reduction, float32_loss, save_state);
  const TripletForward params = triplet_forward_params(arguments, results, margin, reduction);
  const TripletPolicy policy = triplet_policy(params.inputs, context.limits(), checked_form(form));
  const int guess = guesses ? triplet_guess_place(params, context.device, context.stream) : 0;
  // It may be freed at once: the allocator hands it out again on the same stream only.
  Tensor scratch;
  void* scratch_data = nullptr;
  if (const int64_t bytes = triplet_forward_scratch_bytes(params, policy)) {
    scratch = new_tensor(anchor, {bytes}, torch::headeronly::ScalarType::Byte);
    scratch_data = scratch.mutable_data_ptr();
  }
  check_cuda(
      launch_triplet_forward(params, policy, gradients, guess, scratch_data, context.stream));
  return results;
}

std::tuple<Tensor, Tensor> triplet_forward(Tensor anchor, Tensor positive, Tensor negative,
                                           double margin, double p, double eps, bool swap,
                                           int64_t reduction, bool float32_loss, bool save_state,
                                           int64_t form) {
  const TripletArguments arguments(anchor, positive, negative, p, eps, swap);
  const TripletForwardResults results =
      run_forward(anchor, arguments, margin, triplet_reduction(reduction), float32_loss, save_state,
                  {}, false, form);
  return {results.loss, results.state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> triplet_forward_with_gradients(
    Tensor anchor, Tensor positive, Tensor negative, double margin, double p, double eps, bool swap,
    int64_t reduction, bool float32_loss, bool anchor_needs_grad, bool positive_needs_grad,
    bool negative_needs_grad, int64_t form) {
  const TripletArguments arguments(anchor, positive, negative, p, eps, swap);
  const TripletGradientTensors gradients(anchor, anchor_needs_grad, positive_needs_grad,
                                         negative_needs_grad);
  const TripletForwardResults results =
      run_forward(anchor, arguments, margin, triplet_reduction(reduction), float32_loss, true,
                  gradients.pointers(), true, form);
  return {results.loss, results.state, gradients.anchor, gradients.positive, gradients.negative};
}

void run_backward(const Tensor& grad_loss, const Tensor& anchor, const TripletArguments& arguments,
                  const Tensor& state, double margin, int64_t reduction,
                  const TripletGradients& gradients, bool may_be_formed, int64_t form) {
  const CudaContext context(anchor);
  const TripletBackwardArguments backward(grad_loss, state, anchor, arguments, margin,
                                          triplet_reduction(reduction), gradients);
  const TripletPolicy policy =
      triplet_policy(arguments.inputs, context.limits(), checked_form(form));
  const void* header = may_be_formed ? state.const_data_ptr() : nullptr;
  check_cuda(launch_triplet_backward(
      backward.params, policy, static_cast<const TripletStateHeader*>(header), context.stream));
}

std::tuple<Tensor, Tensor, Tensor> triplet_backward(Tensor grad_loss, Tensor anchor,
                                                    Tensor positive, Tensor negative, Tensor state,
                                                    double margin, double p, double eps, bool swap,
                                                    int64_t reduction, bool anchor_needs_grad,
                                                    bool positive_needs_grad,
                                                    bool negative_needs_grad, int64_t form) {
  const TripletArguments arguments(anchor, positive, negative, p, eps, swap);
  const TripletGradientTensors gradients(anchor, anchor_needs_grad, positive_needs_grad,
                                         negative_needs_grad);
  run_backward(grad_loss, anchor, arguments, state, margin, reduction, gradients.pointers(), false,
               form);
  return {gradients.anchor, gradients.positive, gradients.negative};
}

void triplet_correct_gradients(Tensor grad_loss, Tensor anchor, Tensor positive, Tensor negative,
                               Tensor state, double margin, double p, double eps, bool swap,
                               int64_t reduction, Tensor grad_anchor, Tensor grad_positive,
                               Tensor grad_negative, int64_t form) {
  const TripletArguments arguments(anchor, positive, negative, p, eps, swap);
  run_backward(grad_loss, anchor, arguments, state, margin, reduction,
               triplet_gradients(anchor, grad_anchor, grad_positive, grad_negative), true, form);
}

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, library) {
  library.impl("triplet_forward", TORCH_BOX(&fused_ops::triplet_forward));
  library.impl("triplet_forward_with_gradients",
               TORCH_BOX(&fused_ops::triplet_forward_with_gradients));
  library.impl("triplet_backward", TORCH_BOX(&fused_ops::triplet_backward));
  library.impl("triplet_correct_gradients", TORCH_BOX(&fused_ops::triplet_correct_gradients));
}
