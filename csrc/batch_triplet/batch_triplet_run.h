// SPDX-License-Identifier: BSD-3-Clause
// The course of batch_triplet, the same on CPU and CUDA: arguments, memory, products of matrices by
// torch, and in between the kernels of the device.

#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "batch_triplet/batch_triplet.h"
#include "common/tensors.h"

namespace fused_ops {

class BatchTripletKernels {
 public:
  virtual ~BatchTripletKernels() = default;
  // Most bytes of a chunk's products.
  virtual int64_t chunk_bytes() const = 0;
  virtual bool needs_scratch(const BatchTriplet& call) const = 0;
  // Fills `prepared` and `norms` of anchors and references, which may be the same.
  virtual void prepare(const BatchTriplet& call) = 0;
  virtual void mine(const BatchTriplet& call, const BatchChunk& chunk) = 0;
  // Coefficients (count, count) plus their transpose, in place.
  virtual void symmetrise(const BatchTriplet& call, void* coefficients) = 0;
  // into[i] += values[i]
  virtual void add(const BatchTriplet& call, void* into, const void* values, int64_t count) = 0;
  // The loss, () or (A) in the accumulation type, the totals, and what gradients are to be
  // multiplied with.
  virtual void reduce(const BatchTriplet& call, const BatchTotals* anchors,
                      BatchReduction reduction, void* loss, double* totals, double* scale) = 0;
  virtual void gradient(const BatchTriplet& call, const BatchGradient& gradient) = 0;
  virtual void hard_gradient(const BatchTriplet& call, const HardGradient& gradient) = 0;
};

struct BatchTripletSettings {
  int64_t first_own;
  double margin;
  int64_t mining;
  int64_t distance;
  int64_t reduction;
  bool soft;
  bool embeddings_grad;
  bool references_grad;
};

using BatchTripletResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;

BatchTripletResults run_batch_triplet(BatchTripletKernels& kernels, const Tensor& embeddings,
                                      const Tensor& labels, const std::optional<Tensor>& references,
                                      const Tensor& reference_labels,
                                      const std::optional<Tensor>& weights,
                                      const BatchTripletSettings& settings);

// The op of a device, whose kernels are made for the embeddings.
template <typename Kernels>
BatchTripletResults batch_triplet(Tensor embeddings, Tensor labels,
                                  std::optional<Tensor> references, Tensor reference_labels,
                                  std::optional<Tensor> weights, int64_t first_own, double margin,
                                  int64_t mining, int64_t distance, int64_t reduction, bool soft,
                                  bool embeddings_grad, bool references_grad) {
  Kernels kernels(embeddings);
  return run_batch_triplet(
      kernels, embeddings, labels, references, reference_labels, weights,
      {first_own, margin, mining, distance, reduction, soft, embeddings_grad, references_grad});
}

}  // namespace fused_ops
