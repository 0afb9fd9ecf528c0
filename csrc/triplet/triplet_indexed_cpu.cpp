// SPDX-License-Identifier: BSD-3-Clause
// The CPU ops: arguments, allocation, and entries shared out among torch's threads.

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <cstring>
#include <tuple>

#include "triplet/triplet_indexed_arguments.h"
#include "triplet/triplet_indexed_kernel_cpu.h"
#include "triplet/triplet_on_cpu.h"

namespace fused_ops {
namespace {

void check_range(const int64_t* numbers, int64_t count, int64_t low, int64_t high,
                 const char* name) {
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(numbers[i] >= low && numbers[i] < high, name, ": expected ", low, " to ",
                    high - 1, ", got ", numbers[i]);
  }
}

void check_indices(const TripletInputs& in) {
  check_range(in.indices, 3 * in.rows, -in.embeddings, in.embeddings, "indices");
}

std::tuple<Tensor, Tensor> triplet_indexed_forward(Tensor embeddings, Tensor indices, double margin,
                                                   double p, double eps, bool swap,
                                                   int64_t reduction, bool float32_loss,
                                                   bool save_state) {
  const TripletArguments arguments(embeddings, indices, p, eps, swap);
  check_indices(arguments.inputs);
  const TripletForwardResults results = triplet_forward_on_cpu(
      embeddings, arguments, margin, triplet_reduction(reduction), float32_loss, save_state);
  return {results.loss, results.state};
}

Tensor triplet_indexed_backward(Tensor grad_loss, Tensor embeddings, Tensor indices, Tensor state,
                                Tensor order, double margin, double p, double eps, bool swap,
                                int64_t reduction, int64_t /*share*/) {
  const TripletIndexedBackwardArguments arguments(grad_loss, embeddings, indices, state, order,
                                                  margin, p, eps, swap, reduction);
  const TripletIndexedBackward& params = arguments.params;
  const TripletInputs& in = params.backward.inputs;
  check_indices(in);
  check_range(params.order, 3 * in.rows, 0, 3 * in.rows, "order");
  std::memset(params.gradient, 0, in.embeddings * in.dim * element_size(in.type));
  parallel_for_triplets(3 * in.rows, in.dim, [&](int64_t begin, int64_t end) {
    triplet_indexed_backward_entries(params, begin, end);
  });
  return arguments.gradient;
}

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CPU, library) {
  library.impl("triplet_indexed_forward", TORCH_BOX(&fused_ops::triplet_indexed_forward));
  library.impl("triplet_indexed_backward", TORCH_BOX(&fused_ops::triplet_indexed_backward));
}
