// SPDX-License-Identifier: BSD-3-Clause
// What every op asks of its tensors: a kernel's element type, and rows of a matrix.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "common/scalar_type.h"

namespace fused_ops {

using torch::stable::Tensor;

// The element type of `tensor`; raises where no kernel takes it.
ScalarType kernel_scalar_type(const Tensor& tensor, const char* name);

// The torch dtype that kernels accumulate `type` in: float32, or float64 for float64.
torch::headeronly::ScalarType accumulate_dtype(ScalarType type);

// A new contiguous tensor on the device of `like`. A short cut to the allocator: torch::stable's
// factories look their operator up by name each time, about 1 us.
Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& sizes,
                  torch::headeronly::ScalarType dtype);

// A tensor (..., dim) as a matrix of `count` rows, `stride` elements apart, each contiguous.
// A tensor whose leading dimensions are not evenly spaced, or whose last is strided, is copied.
struct Rows {
  explicit Rows(const Tensor& source);

  Tensor tensor;  // keeps the memory alive
  int64_t count;
  int64_t dim;
  int64_t stride;
};

}  // namespace fused_ops
