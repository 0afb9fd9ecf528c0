// SPDX-License-Identifier: BSD-3-Clause
// The contract of batch_triplet_loss between its op and its kernels.
//
// Of anchors x (A, dim) and references y (M, dim), d_ij is the distance of x_i from y_j. The
// positives of anchor i are the references with its label, except reference first_own + i, which is
// the anchor itself; its negatives are those with another label. An anchor that has both has items:
// triplets (all), pairs with a positive (semihard) or one (hard), each with a loss
// max(d_ip - d_in + margin, 0), or softplus of it, and a weight, the derivative of that loss.
//
// The gradient follows from coefficients c_ij = (dL / d d_ij) / d_ij, or without the division by
// d_ij for squared distances:
//
//   dL/dx_i = sum_j c_ij (x_i - y_j)      dL/dy_j = sum_i c_ij (y_j - x_i)
//
// "all" and "semihard" write the coefficients in the place of a row's inner products and leave the
// sums to two products of matrices; "hard" has two a row and keeps them apart.
//
// Rows are prepared first: in the accumulation type, minus a centre that is the same for all, which
// keeps digits where rows are close together compared with their norms, and with a one behind them,
// by which the products also form the sums of c.

#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/scalar_type.h"

namespace fused_ops {

enum class Mining : int8_t { all, semihard, hard };
enum class BatchDistance : int8_t { euclidean, squared, half_squared };
enum class BatchReduction : int8_t { none, mean, mean_active, sum };

struct BatchRows {
  const void* data;  // (count, dim), rows `stride` elements apart
  int64_t count;
  int64_t stride;
  const int64_t* labels;  // (count)
  void* prepared;         // (count, prepared_width(dim)) in the accumulation type
  void* norms;            // (count) in the accumulation type: squared, of the prepared rows
};

// Columns of prepared rows: those of the rows, a one, and zeros up to a whole 16 bytes of float.
constexpr int64_t prepared_width(int64_t dim) { return (dim + 4) / 4 * 4; }

// The centre is the mean of at most so many references, evenly spaced: any would do.
constexpr int64_t kCentreRows = 1024;

// What an anchor contributes; summed over the anchors, what the op returns as its totals.
struct BatchTotals {
  double loss;
  double items;
  double active;  // items whose loss is above zero
  double positive_sum;
  double positives;  // pairs in positive_sum
  double negative_sum;
  double negatives;

  FUSED_OPS_HOST_DEVICE void merge(const BatchTotals& other) {
    loss += other.loss;
    items += other.items;
    active += other.active;
    positive_sum += other.positive_sum;
    positives += other.positives;
    negative_sum += other.negative_sum;
    negatives += other.negatives;
  }
};
constexpr int kBatchTotals = sizeof(BatchTotals) / sizeof(double);

// The two references that "hard" picks for an anchor; without any both are -1.
template <typename T>
struct HardPicks {
  int64_t positive;
  int64_t negative;
  T positive_coefficient;
  T negative_coefficient;
};

struct BatchTriplet {
  ScalarType type;  // of the rows
  int64_t dim;
  BatchRows anchors;
  BatchRows references;
  int64_t first_own;  // or -1 where no anchor is among the references
  double margin;
  Mining mining;
  BatchDistance distance;
  bool soft;
  const void*
      weights;  // (A) in the accumulation type, of each anchor's loss in the gradient; or null
  bool coefficients;  // whether the gradient is wanted

  // Whether the anchors are the references.
  bool shares_rows() const { return anchors.prepared == references.prepared; }
};

// Anchors [first, first + count), whose inner products with all references are in `products`
// (count, M), which mining overwrites.
struct BatchChunk {
  int64_t first;
  int64_t count;
  void* products;
  void* scratch;        // (count, M) of the same type, where batch_needs_scratch says so; or null
  BatchTotals* totals;  // (A)
  void* picks;          // (A) HardPicks
};

// The sums of a gradient, as the products with prepared rows leave them: (count, prepared width).
struct BatchGradient {
  const BatchRows* rows;
  const void* sums;
  const void* more_sums;  // to be added to them, or null
  const double* scale;
  void* gradient;  // (count, dim) in the accumulation type
};

// Of "hard", from the picks of all anchors: what rows get as anchors, as references, or as both.
struct HardGradient {
  const BatchRows* rows;
  bool as_anchors;
  bool as_references;
  const void* picks;
  const double* scale;
  void* gradient;
};

}  // namespace fused_ops
