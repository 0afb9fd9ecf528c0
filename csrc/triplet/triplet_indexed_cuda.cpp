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

Tensor entries_in_order(const Tensor& like, const TripletInputs& in, cudaStream_t stream) {
  constexpr int64_t size = sizeof(uint64_t);
  const Tensor order = scratch_of(like, 3 * in.rows * size);
  const Tensor unsorted = scratch_of(like, 3 * in.rows * size);
  const auto launch = [&](void* scratch, size_t& bytes) {
    check_cuda(launch_triplet_indexed_order(in, static_cast<uint64_t*>(unsorted.mutable_data_ptr()),
                                            static_cast<uint64_t*>(order.mutable_data_ptr()),
                                            scratch, bytes, stream));
  };
  size_t bytes = 0;
  launch(nullptr, bytes);
  launch(scratch_of(like, static_cast<int64_t>(bytes)).mutable_data_ptr(), bytes);
  return order;
}

Tensor triplet_indexed_backward(Tensor grad_loss, Tensor embeddings, Tensor indices, Tensor state,
                                double margin, double p, double eps, bool swap, int64_t reduction,
                                int64_t share) {
  STD_TORCH_CHECK(share >= 0, "share: expected 0 or more, got ", share);
  const CudaContext context(embeddings);
  const TripletIndexedBackwardArguments arguments(grad_loss, embeddings, indices, state, margin, p,
                                                  eps, swap, reduction);
  TripletIndexedBackward params = arguments.params;
  const TripletInputs& in = params.backward.inputs;
  const Tensor order = entries_in_order(embeddings, in, context.stream);
  params.order = static_cast<const uint64_t*>(order.const_data_ptr());
  const TripletIndexedPolicy policy =
      triplet_indexed_policy(in, context.limits().multiprocessors, share);
  const Tensor scratch = scratch_of(embeddings, triplet_indexed_backward_bytes(in, policy));
  check_cuda(
      launch_triplet_indexed_backward(params, policy, scratch.mutable_data_ptr(), context.stream));
  return arguments.gradient;
}

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, library) {
  library.impl("triplet_indexed_forward", TORCH_BOX(&fused_ops::triplet_indexed_forward));
  library.impl("triplet_indexed_backward", TORCH_BOX(&fused_ops::triplet_indexed_backward));
}
