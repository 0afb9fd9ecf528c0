// SPDX-License-Identifier: BSD-3-Clause
// What surrounds the mining on the CPU: the rows before it, losses and gradients after it.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "batch_triplet/batch_triplet_formula.h"
#include "batch_triplet/batch_triplet_kernel_cpu.h"
#include "common/clones.h"
#include "common/cpu_scalar.h"

namespace fused_ops {
namespace {

// Calls `function` with a null pointer of the accumulation type.
template <typename Function>
void dispatch_accumulate(ScalarType type, const Function& function) {
  if (type == ScalarType::float64) {
    function(static_cast<double*>(nullptr));
  } else {
    function(static_cast<float*>(nullptr));
  }
}

template <typename scalar, typename T>
FUSED_OPS_CLONES void add_scaled_difference(const scalar* x, const scalar* y, T factor, int64_t dim,
                                            T* to) {
#pragma GCC ivdep
  for (int64_t k = 0; k < dim; ++k) {
    to[k] += factor * (static_cast<T>(x[k]) - static_cast<T>(y[k]));
  }
}

}  // namespace

BatchCentre::BatchCentre(const BatchTriplet& call) : type_(call.type), centre_(call.dim) {
  dispatch_scalar(call.type, [&](auto* null) {
    using scalar = std::remove_reference_t<decltype(*null)>;
    const BatchRows& y = call.references;
    const int64_t step = (y.count + kCentreRows - 1) / kCentreRows;
    double rows = 0;
    for (int64_t j = 0; j < y.count; j += step, ++rows) {
      const scalar* row = static_cast<const scalar*>(y.data) + j * y.stride;
      for (int64_t k = 0; k < call.dim; ++k) centre_[k] += static_cast<double>(row[k]);
    }
    for (double& value : centre_) value = std::isfinite(value) ? value / rows : 0;
  });
}

void BatchCentre::prepare(const BatchRows& rows, int64_t begin, int64_t end) const {
  dispatch_scalar(type_, [&](auto* null) {
    using scalar = std::remove_reference_t<decltype(*null)>;
    using T = Accumulate<scalar>;
    const auto dim = static_cast<int64_t>(centre_.size());
    const int64_t width = prepared_width(dim);
    for (int64_t row = begin; row < end; ++row) {
      const scalar* from = static_cast<const scalar*>(rows.data) + row * rows.stride;
      T* to = static_cast<T*>(rows.prepared) + row * width;
      T norm = 0;
      for (int64_t k = 0; k < dim; ++k) {
        to[k] = static_cast<T>(from[k]) - static_cast<T>(centre_[k]);
        norm += to[k] * to[k];
      }
      for (int64_t k = dim; k < width; ++k) to[k] = T(k == dim);
      static_cast<T*>(rows.norms)[row] = norm;
    }
  });
}

void batch_triplet_symmetrise(const BatchTriplet& call, void* coefficients, int64_t begin,
                              int64_t end) {
  dispatch_accumulate(call.type, [&](auto* null) {
    using T = std::remove_reference_t<decltype(*null)>;
    T* const c = static_cast<T*>(coefficients);
    const int64_t count = call.anchors.count;
    T mirrored[kTransposedRows][kTransposedRows + 1];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block * kTransposedRows;
      const int64_t rows = std::min(kTransposedRows, count - row);
      for (int64_t column = row; column < count; column += kTransposedRows) {
        const int64_t columns = std::min(kTransposedRows, count - column);
        for (int64_t j = 0; j < columns; ++j) {
          std::copy_n(c + (column + j) * count + row, rows, mirrored[j]);
        }
        for (int64_t i = 0; i < rows; ++i) {
          T* const at = c + (row + i) * count + column;
          for (int64_t j = 0; j < columns; ++j) {
            at[j] += mirrored[j][i];
            mirrored[j][i] = at[j];
          }
        }
        if (column == row) continue;  // which holds both already
        for (int64_t j = 0; j < columns; ++j) {
          std::copy_n(mirrored[j], rows, c + (column + j) * count + row);
        }
      }
    }
  });
}

void batch_triplet_add(const BatchTriplet& call, void* into, const void* values, int64_t count) {
  dispatch_accumulate(call.type, [&](auto* null) {
    using T = std::remove_reference_t<decltype(*null)>;
    for (int64_t i = 0; i < count; ++i)
      static_cast<T*>(into)[i] += static_cast<const T*>(values)[i];
  });
}

void batch_triplet_reduce(const BatchTriplet& call, const BatchTotals* anchors,
                          BatchReduction reduction, void* loss, double* totals, double* scale) {
  dispatch_accumulate(call.type, [&](auto* null) {
    using T = std::remove_reference_t<decltype(*null)>;
    BatchTotals sum{};
    for (int64_t i = 0; i < call.anchors.count; ++i) {
      sum.merge(anchors[i]);
      if (reduction == BatchReduction::none)
        static_cast<T*>(loss)[i] = static_cast<T>(anchors[i].loss);
    }
    *scale = loss_scale(sum, reduction);
    if (reduction != BatchReduction::none)
      *static_cast<T*>(loss) = static_cast<T>(sum.loss * *scale);
    *reinterpret_cast<BatchTotals*>(totals) = sum;
  });
}

void batch_triplet_gradient(const BatchTriplet& call, const BatchGradient& gradient, int64_t begin,
                            int64_t end) {
  dispatch_accumulate(call.type, [&](auto* null) {
    using T = std::remove_reference_t<decltype(*null)>;
    const int64_t width = prepared_width(call.dim);
    const auto* sums = static_cast<const T*>(gradient.sums);
    const auto* more = static_cast<const T*>(gradient.more_sums);
    const T scale = static_cast<T>(*gradient.scale);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * width, one = at + call.dim;
      const T total = sums[one] + (more == nullptr ? T(0) : more[one]);
      const T* x = static_cast<const T*>(gradient.rows->prepared) + at;
      T* to = static_cast<T*>(gradient.gradient) + row * call.dim;
      for (int64_t k = 0; k < call.dim; ++k) {
        const T sum = sums[at + k] + (more == nullptr ? T(0) : more[at + k]);
        to[k] = scale * (total * x[k] - sum);
      }
    }
  });
}

void batch_triplet_hard_gradient(const BatchTriplet& call, const HardGradient& gradient) {
  dispatch_scalar(call.type, [&](auto* null) {
    using scalar = std::remove_reference_t<decltype(*null)>;
    using T = Accumulate<scalar>;
    const BatchRows &x = call.anchors, &y = call.references;
    T* const to = static_cast<T*>(gradient.gradient);
    std::fill_n(to, gradient.rows->count * call.dim, T(0));
    const auto* picks = static_cast<const HardPicks<T>*>(gradient.picks);
    const T scale = static_cast<T>(*gradient.scale);
    const auto add = [&](int64_t anchor, int64_t reference, T coefficient) {
      if (coefficient == 0) return;
      const scalar* x_i = static_cast<const scalar*>(x.data) + anchor * x.stride;
      const scalar* y_j = static_cast<const scalar*>(y.data) + reference * y.stride;
      const T factor = scale * coefficient;
      if (gradient.as_anchors) {
        add_scaled_difference(x_i, y_j, factor, call.dim, to + anchor * call.dim);
      }
      if (gradient.as_references) {
        add_scaled_difference(y_j, x_i, factor, call.dim, to + reference * call.dim);
      }
    };
    for (int64_t i = 0; i < x.count; ++i) {
      if (picks[i].positive < 0) continue;
      add(i, picks[i].positive, picks[i].positive_coefficient);
      add(i, picks[i].negative, picks[i].negative_coefficient);
    }
  });
}

}  // namespace fused_ops
