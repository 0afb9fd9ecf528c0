// SPDX-License-Identifier: BSD-3-Clause
// The CPU ops: arguments, allocation, and items shared out among torch's threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "common/cpu_memory.h"
#include "common/huge_pages.h"
#include "triplet/triplet_arguments.h"
#include "triplet/triplet_kernel_cpu.h"

namespace fused_ops {
namespace {

// Elements that repay a thread: below it, waking a second one costs more than it saves.
constexpr int64_t kElementsPerThread = 32768;

template <typename Function>
void for_items(const TripletInputs& in, const Function& function) {
  const int64_t items = in.rows * triplet_chunks(in.dim);
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::min(in.dim, kTripletChunk));
  if (items <= grain) {
    function(0, items);
  } else {
    torch::stable::parallel_for(0, items, grain, function);
  }
}

std::tuple<Tensor, Tensor> triplet_forward(Tensor anchor, Tensor positive, Tensor negative,
                                           double margin, double p, double eps, bool swap,
                                           int64_t reduction_, bool float32_loss, bool save_state,
                                           int64_t /*form*/) {
  const Reduction reduction = triplet_reduction(reduction_);
  const TripletArguments arguments(anchor, positive, negative, p, eps, swap);
  TripletForwardResults results(anchor, arguments, reduction, float32_loss, save_state);
  const TripletForward params = triplet_forward_params(arguments, results, margin, reduction);
  const auto scratch = cpu_memory<char>(triplet_forward_scratch_bytes(params));
  for_items(params.inputs, [&](int64_t begin, int64_t end) {
    triplet_forward_items(params, scratch.get(), begin, end);
  });
  triplet_forward_finish(params, scratch.get());
  return {results.loss, results.state};
}

std::tuple<Tensor, Tensor, Tensor> triplet_backward(Tensor grad_loss, Tensor anchor,
                                                    Tensor positive, Tensor negative, Tensor state,
                                                    double margin, double p, double eps, bool swap,
                                                    int64_t reduction_, bool anchor_needs_grad,
                                                    bool positive_needs_grad,
                                                    bool negative_needs_grad, int64_t /*form*/) {
  const Reduction reduction = triplet_reduction(reduction_);
  const TripletArguments arguments(anchor, positive, negative, p, eps, swap);
  const TripletGradientTensors gradients(anchor, anchor_needs_grad, positive_needs_grad,
                                         negative_needs_grad);
  const TripletBackwardArguments backward(grad_loss, state, anchor, arguments, margin, reduction,
                                          gradients.pointers());
  const TripletBackward& params = backward.params;
  const int64_t bytes = params.inputs.rows * params.inputs.dim * element_size(params.inputs.type);
  for (void* gradient :
       {params.gradients.anchor, params.gradients.positive, params.gradients.negative}) {
    if (gradient != nullptr) advise_huge_pages(gradient, bytes);
  }
  for_items(params.inputs,
            [&](int64_t begin, int64_t end) { triplet_backward_items(params, begin, end); });
  return {gradients.anchor, gradients.positive, gradients.negative};
}

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CPU, library) {
  library.impl("triplet_forward", TORCH_BOX(&fused_ops::triplet_forward));
  library.impl("triplet_backward", TORCH_BOX(&fused_ops::triplet_backward));
}
