// SPDX-License-Identifier: BSD-3-Clause
// The contract of triplet_margin_loss between its ops and its kernels.
//
//   u = anchor - positive + eps      v = anchor - negative + eps      w = positive - negative + eps
//   d(x) = |x|_p over the last dimension, p in {1, 2, inf}
//   unclamped = margin + d(u) - (swap ? min(d(v), d(w)) : d(v))
//   loss = max(unclamped, 0), per row, or their sum or mean
//
// All arithmetic is in the accumulation type (float32; float64 for float64 inputs) and a result is
// rounded once. NaN reaches the loss. triplet_formula.h has the gradient.

#pragma once

#include <cstdint>
#include <type_traits>

#include "common/host_device.h"
#include "common/scalar_type.h"

namespace fused_ops {

enum class Norm : int8_t { one, two, infinity };

// Calls `function` with `norm` as a type.
template <typename Function>
auto dispatch_norm(Norm norm, Function&& function) {
  switch (norm) {
    case Norm::one:
      return function(std::integral_constant<Norm, Norm::one>{});
    case Norm::two:
      return function(std::integral_constant<Norm, Norm::two>{});
    default:
      return function(std::integral_constant<Norm, Norm::infinity>{});
  }
}

enum class Reduction : int8_t { none = 0, mean = 1, sum = 2 };  // numbered as torch does

// What the forward keeps for the backward, in the accumulation type: a header, and for each row the
// distances d(u), d(v) and with the swap d(w), then for p = inf how many elements attain each.
//
// The header says whether the forward has formed the gradients too, and for which upstream gradient
// it did: it cannot know that one, so it takes the last one seen, which loss weights and scales
// leave the same for thousands of steps. The backward compares on the device.
struct alignas(16) TripletStateHeader {
  double upstream;  // the upstream gradient that the gradients were formed with
  int32_t formed;   // whether they were
  int32_t guess;    // where the upstream gradient is remembered (triplet_guess.h), 0 for nowhere
};

constexpr int state_columns(Norm norm, bool swap) {
  return (swap ? 3 : 2) * (norm == Norm::infinity ? 2 : 1);
}

struct TripletInputs {
  ScalarType type;  // of anchor, positive and negative
  Norm norm;
  bool is_absolute;  // whether norm one stands for two, of a single element
  bool swap;
  double eps;
  int64_t rows;
  int64_t dim;
  const void* anchor;    // (rows, dim), rows `anchor_stride` elements apart
  const void* positive;  // (rows, dim)
  const void* negative;  // (rows, dim)
  int64_t anchor_stride;
  int64_t positive_stride;
  int64_t negative_stride;
  // Of triplet_margin_loss_indexed, where the three inputs are one: which of the `embeddings` rows
  // are the anchor, positive and negative of a triplet, (3, rows). Else null: those of its number.
  const int64_t* indices;
  int64_t embeddings;
};

// The row that an index stands for, which counts from the end below 0. Indices are in range: the
// CPU op has looked at all, and on CUDA one that is not stops the kernel, and reads nothing.
FUSED_OPS_HOST_DEVICE inline int64_t embedding_row(int64_t index, int64_t embeddings) {
#ifdef __CUDA_ARCH__
  if (index < -embeddings || index >= embeddings) {
    __assert_fail("index out of range", "fused_ops.triplet_margin_loss_indexed", 0, __func__);
    return 0;
  }
#endif
  return index < 0 ? index + embeddings : index;
}

struct TripletForward {
  TripletInputs inputs;
  double margin;
  Reduction reduction;
  bool accumulate_loss;        // whether `loss` has the accumulation type rather than the inputs'
  void* loss;                  // (rows) for Reduction::none, else one element
  TripletStateHeader* header;  // or null where no state is kept
  void* state;                 // (rows, state_columns) in the accumulation type, right behind it
};

// The gradients of the inputs, (rows, dim) contiguous each, or null where not wanted.
struct TripletGradients {
  void* anchor;
  void* positive;
  void* negative;
};

struct TripletBackward {
  TripletInputs inputs;
  double margin;
  Reduction reduction;
  bool accumulate_loss;      // the type of `grad_loss`, as in the forward
  const void* grad_loss;     // (rows) for Reduction::none, else one element
  int64_t grad_loss_stride;  // in elements; 0 where one element serves every row
  const void* state;         // (rows, state_columns) of the forward
  TripletGradients gradients;
};

}  // namespace fused_ops
