// SPDX-License-Identifier: BSD-3-Clause
// The CPU ops: arguments, allocation, and entries shared out among torch's threads.

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <tuple>

#include "common/cpu_memory.h"
#include "triplet/triplet_indexed_arguments.h"
#include "triplet/triplet_indexed_kernel_cpu.h"
#include "triplet/triplet_on_cpu.h"

namespace fused_ops {
namespace {

void check_indices(const TripletInputs& in) {
  for (int64_t i = 0; i < 3 * in.rows; ++i) {
    STD_TORCH_CHECK(in.indices[i] >= -in.embeddings && in.indices[i] < in.embeddings,
                    "indices: expected ", -in.embeddings, " to ", in.embeddings - 1, ", got ",
                    in.indices[i]);
  }
}

// By counting, since the entries come in ascending order.
std::unique_ptr<uint64_t[]> entries_in_order(const TripletInputs& in,
                                             const TripletEntryBits& bits) {
  const int64_t count = in.embeddings + 1;
  const auto places = cpu_memory<int64_t>(count);  // of a row's next entry, shifted by one
  std::fill_n(places.get(), count, 0);
  for (int64_t entry = 0; entry < 3 * in.rows; ++entry) ++places[entry_row(in, entry) + 1];
  std::partial_sum(places.get(), places.get() + count, places.get());
  auto keys = cpu_memory<uint64_t>(3 * in.rows);
  for (int64_t entry = 0; entry < 3 * in.rows; ++entry) {
    const int64_t row = entry_row(in, entry);
    keys[places[row]++] = bits.key(row, entry);
  }
  return keys;
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
                                double margin, double p, double eps, bool swap, int64_t reduction,
                                int64_t /*share*/) {
  const TripletIndexedBackwardArguments arguments(grad_loss, embeddings, indices, state, margin, p,
                                                  eps, swap, reduction);
  TripletIndexedBackward params = arguments.params;
  const TripletInputs& in = params.backward.inputs;
  check_indices(in);
  const auto order = entries_in_order(in, params.bits);
  params.order = order.get();
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
