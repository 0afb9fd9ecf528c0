// SPDX-License-Identifier: BSD-3-Clause
// The CUDA ops: arguments, allocation, device guard, current stream, launch.

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>

#include "common/cuda_launch.h"
#include "triplet/triplet_indexed_arguments.h"
#include "triplet/triplet_indexed_launch.h"

namespace fused_ops {
namespace {

// It may be freed at once: the allocator hands it out again on the same stream only.
Tensor scratch_of(const Tensor& like, int64_t bytes) {
  return new_tensor(like, {bytes}, torch::headeronly::ScalarType::Byte);
}

std::tuple<Tensor, Tensor> triplet_indexed_forward(Tensor embeddings, Tensor indices, double margin,
                                                   double p, double eps, bool swap,
                                                   int64_t reduction_, bool float32_loss,
                                                   bool save_state) {
  const TripletArguments arguments(embeddings, indices, p, eps, swap);
  const Reduction reduction = triplet_reduction(reduction_);
  const CudaContext context(embeddings);
  const TripletForwardResults results(embeddings, arguments, reduction, float32_loss, save_state);
  const TripletForward params = triplet_forward_params(arguments, results, margin, reduction);
  const TripletIndexedPolicy policy =
      triplet_indexed_policy(params.inputs, context.limits().multiprocessors, 0);
  const Tensor scratch = scratch_of(embeddings, triplet_indexed_forward_bytes(params, policy));
  check_cuda(
      launch_triplet_indexed_forward(params, policy, scratch.mutable_data_ptr(), context.stream));
  return {results.loss, results.state};
}

Tensor triplet_indexed_backward(Tensor grad_loss, Tensor embeddings, Tensor indices, Tensor state,
                                Tensor order, double margin, double p, double eps, bool swap,
                                int64_t reduction, int64_t share) {
  STD_TORCH_CHECK(share >= 0, "share: expected 0 or more, got ", share);
  const CudaContext context(embeddings);
  const TripletIndexedBackwardArguments arguments(grad_loss, embeddings, indices, state, order,
                                                  margin, p, eps, swap, reduction);
  const TripletInputs& in = arguments.params.backward.inputs;
  const TripletIndexedPolicy policy =
      triplet_indexed_policy(in, context.limits().multiprocessors, share);
  const Tensor scratch = scratch_of(embeddings, triplet_indexed_backward_bytes(in, policy));
  check_cuda(launch_triplet_indexed_backward(arguments.params, policy, scratch.mutable_data_ptr(),
                                             context.stream));
  return arguments.gradient;
}

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, library) {
  library.impl("triplet_indexed_forward", TORCH_BOX(&fused_ops::triplet_indexed_forward));
  library.impl("triplet_indexed_backward", TORCH_BOX(&fused_ops::triplet_indexed_backward));
}
