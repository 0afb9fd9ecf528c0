// SPDX-License-Identifier: BSD-3-Clause
// The CUDA op: device guard, current stream, launches.

#include <torch/csrc/stable/library.h>

#include "batch_triplet/batch_triplet_launch.h"
#include "batch_triplet/batch_triplet_run.h"
#include "common/cuda_launch.h"

namespace fused_ops {
namespace {

class CudaKernels : public BatchTripletKernels {
 public:
  explicit CudaKernels(const Tensor& like) : like_(like), context_(like) {}

  int64_t chunk_bytes() const override { return int64_t{256} << 20; }
  bool needs_scratch(const BatchTriplet& call) const override {
    return call.coefficients && call.mining != Mining::hard &&
           call.references.count > kMostPositives;
  }
  void prepare(const BatchTriplet& call) override {
    // It may be freed at once: the allocator hands it out again on the same stream only.
    const Tensor centre = new_tensor(like_, {call.dim}, accumulate_dtype(call.type));
    check_cuda(launch_batch_prepare(call, centre.mutable_data_ptr(), context_.stream));
  }
  void mine(const BatchTriplet& call, const BatchChunk& chunk) override {
    check_cuda(launch_batch_mine(call, chunk, context_.stream));
  }
  void symmetrise(const BatchTriplet& call, void* coefficients) override {
    check_cuda(launch_batch_symmetrise(call, coefficients, context_.stream));
  }
  void add(const BatchTriplet& call, void* into, const void* values, int64_t count) override {
    check_cuda(launch_batch_add(call, into, values, count, context_.stream));
  }
  void reduce(const BatchTriplet& call, const BatchTotals* anchors, BatchReduction reduction,
              void* loss, double* totals, double* scale) override {
    check_cuda(launch_batch_reduce(call, anchors, reduction, loss, totals, scale, context_.stream));
  }
  void gradient(const BatchTriplet& call, const BatchGradient& gradient) override {
    check_cuda(launch_batch_gradient(call, gradient, context_.stream));
  }
  void hard_gradient(const BatchTriplet& call, const HardGradient& gradient) override {
    check_cuda(launch_batch_hard_gradient(call, gradient, context_.stream));
  }

 private:
  Tensor like_;
  CudaContext context_;
};

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, library) {
  library.impl("batch_triplet", TORCH_BOX(&fused_ops::batch_triplet<fused_ops::CudaKernels>));
}
