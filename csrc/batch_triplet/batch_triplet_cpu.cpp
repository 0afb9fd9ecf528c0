// SPDX-License-Identifier: BSD-3-Clause
// The CPU op: the kernels' work shared out among torch's threads.

#include <torch/csrc/stable/library.h>

#include "batch_triplet/batch_triplet_kernel_cpu.h"
#include "batch_triplet/batch_triplet_run.h"
#include "common/ceil_div.h"
#include "common/cpu_parallel.h"

namespace fused_ops {
namespace {

constexpr int64_t kElementsPerThread = 16384;

template <typename Function>
void for_rows(int64_t rows, int64_t elements_per_row, const Function& function) {
  parallel_for_items(rows, elements_per_row, kElementsPerThread, function);
}

class CpuKernels : public BatchTripletKernels {
 public:
  explicit CpuKernels(const Tensor& /*like*/) {}

  int64_t chunk_bytes() const override { return int64_t{32} << 20; }
  bool needs_scratch(const BatchTriplet&) const override { return false; }

  void prepare(const BatchTriplet& call) override {
    const BatchCentre centre(call);
    const auto prepare_rows = [&](const BatchRows& rows) {
      for_rows(rows.count, call.dim,
               [&](int64_t begin, int64_t end) { centre.prepare(rows, begin, end); });
    };
    prepare_rows(call.anchors);
    if (!call.shares_rows()) prepare_rows(call.references);
  }
  void mine(const BatchTriplet& call, const BatchChunk& chunk) override {
    for_rows(chunk.count, call.references.count,
             [&](int64_t begin, int64_t end) { batch_triplet_mine(call, chunk, begin, end); });
  }
  void symmetrise(const BatchTriplet& call, void* coefficients) override {
    const int64_t count = call.anchors.count;
    for_rows(ceil_div(count, kTransposedRows), kTransposedRows * count,
             [&](int64_t begin, int64_t end) {
               batch_triplet_symmetrise(call, coefficients, begin, end);
             });
  }
  void add(const BatchTriplet& call, void* into, const void* values, int64_t count) override {
    batch_triplet_add(call, into, values, count);
  }
  void reduce(const BatchTriplet& call, const BatchTotals* anchors, BatchReduction reduction,
              void* loss, double* totals, double* scale) override {
    batch_triplet_reduce(call, anchors, reduction, loss, totals, scale);
  }
  void gradient(const BatchTriplet& call, const BatchGradient& gradient) override {
    for_rows(gradient.rows->count, call.dim, [&](int64_t begin, int64_t end) {
      batch_triplet_gradient(call, gradient, begin, end);
    });
  }
  void hard_gradient(const BatchTriplet& call, const HardGradient& gradient) override {
    batch_triplet_hard_gradient(call, gradient);
  }
};

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CPU, library) {
  library.impl("batch_triplet", TORCH_BOX(&fused_ops::batch_triplet<fused_ops::CpuKernels>));
}
