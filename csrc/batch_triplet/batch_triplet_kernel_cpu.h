// SPDX-License-Identifier: BSD-3-Clause
// The CPU kernels of batch_triplet_loss on raw pointers, by ranges of rows that threads may share.

#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "batch_triplet/batch_triplet.h"

namespace fused_ops {

template <typename scalar>
using Accumulate = std::conditional_t<std::is_same_v<scalar, double>, double, float>;

// The mean of up to kCentreRows references.
class BatchCentre {
 public:
  explicit BatchCentre(const BatchTriplet& call);
  void prepare(const BatchRows& rows, int64_t begin, int64_t end) const;

 private:
  ScalarType type_;
  std::vector<double> centre_;
};

// Of rows [begin, end) of the chunk.
void batch_triplet_mine(const BatchTriplet& call, const BatchChunk& chunk, int64_t begin,
                        int64_t end);
// By blocks of rows, of which each takes the part of the matrix right of the diagonal, and its
// mirror image.
constexpr int64_t kTransposedRows = 32;
void batch_triplet_symmetrise(const BatchTriplet& call, void* coefficients, int64_t begin,
                              int64_t end);
void batch_triplet_add(const BatchTriplet& call, void* into, const void* values, int64_t count);
void batch_triplet_reduce(const BatchTriplet& call, const BatchTotals* anchors,
                          BatchReduction reduction, void* loss, double* totals, double* scale);
void batch_triplet_gradient(const BatchTriplet& call, const BatchGradient& gradient, int64_t begin,
                            int64_t end);
void batch_triplet_hard_gradient(const BatchTriplet& call, const HardGradient& gradient);

}  // namespace fused_ops
