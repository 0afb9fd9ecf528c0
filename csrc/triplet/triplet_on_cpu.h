// SPDX-License-Identifier: BSD-3-Clause
// What the CPU ops of triplet_margin_loss share: the forward, and work shared out among torch's
// threads.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cpu_memory.h"
#include "common/cpu_parallel.h"
#include "triplet/triplet_arguments.h"
#include "triplet/triplet_kernel_cpu.h"

namespace fused_ops {

constexpr int64_t kTripletElementsPerThread = 32768;

// Calls `function(begin, end)` with parts of [0, items).
template <typename Function>
void parallel_for_triplets(int64_t items, int64_t elements_per_item, const Function& function) {
  parallel_for_items(items, elements_per_item, kTripletElementsPerThread, function);
}

// The items are those of triplet_kernel_cpu.h.
template <typename Function>
void for_triplet_items(const TripletInputs& in, const Function& function) {
  parallel_for_triplets(in.rows * triplet_chunks(in.dim), std::min(in.dim, kTripletChunk),
                        function);
}

inline TripletForwardResults triplet_forward_on_cpu(const Tensor& like,
                                                    const TripletArguments& arguments,
                                                    double margin, Reduction reduction,
                                                    bool float32_loss, bool save_state) {
  TripletForwardResults results(like, arguments, reduction, float32_loss, save_state);
  const TripletForward params = triplet_forward_params(arguments, results, margin, reduction);
  const auto scratch = cpu_memory<char>(triplet_forward_scratch_bytes(params));
  for_triplet_items(params.inputs, [&](int64_t begin, int64_t end) {
    triplet_forward_items(params, scratch.get(), begin, end);
  });
  triplet_forward_finish(params, scratch.get());
  return results;
}

}  // namespace fused_ops
