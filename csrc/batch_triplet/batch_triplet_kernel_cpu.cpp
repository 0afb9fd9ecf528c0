// SPDX-License-Identifier: BSD-3-Clause
// CPU kernels of batch_triplet_loss.
//
// An anchor's positives are sorted. For "all" their thresholds t = d_ip + margin: a negative takes
// part in as many triplets as there are thresholds above its distance, and counts itself into the
// bin of the first, from which each positive learns how many negatives lie below its threshold. The
// loss is the sum of count * t over the positives minus that of count * d over the negatives. For
// "semihard" each bin keeps the nearest negative that lies there, and the minimum from the back is
// what a positive looks for.

#include "batch_triplet/batch_triplet_kernel_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "batch_triplet/batch_triplet_formula.h"
#include "common/clones.h"
#include "common/cpu_scalar.h"

namespace fused_ops {
namespace {

template <typename scalar>
using Accumulate = std::conditional_t<std::is_same_v<scalar, double>, double, float>;

constexpr int64_t kFewPositives = 24;  // compared one by one, in vectors, rather than searched

// Calls `function` with a null pointer of the accumulation type.
template <typename Function>
void dispatch_accumulate(ScalarType type, const Function& function) {
  if (type == ScalarType::float64) {
    function(static_cast<double*>(nullptr));
  } else {
    function(static_cast<float*>(nullptr));
  }
}

// Squared distances in the place of inner products, -1 where they must be formed from differences.
// Returns whether there are such.
template <typename T>
FUSED_OPS_CLONES bool products_to_squares(T* row, const T* norms, T norm, int64_t count) {
  int any = 0;
#pragma GCC ivdep
  for (int64_t j = 0; j < count; ++j) {
    bool near = false;
    const T squared = squared_from_product(row[j], norm, norms[j], near);
    row[j] = near ? T(-1) : squared;
    any |= near;
  }
  return any != 0;
}

template <typename scalar, typename T>
FUSED_OPS_CLONES T squared_difference(const scalar* x, const scalar* y, int64_t dim) {
  T sum = 0;
  for (int64_t k = 0; k < dim; ++k) {
    const T difference = static_cast<T>(x[k]) - static_cast<T>(y[k]);
    sum += difference * difference;
  }
  return sum;
}

template <typename T>
FUSED_OPS_CLONES void count_above(const T* row, T threshold, int64_t count, int32_t* counts) {
#pragma GCC ivdep
  for (int64_t j = 0; j < count; ++j) counts[j] += row[j] < threshold;
}

template <typename T>
struct Neighbour {
  T distance;
  int64_t index;
};

// One anchor at a time; the memory is kept from one to the next.
template <typename scalar>
class Miner {
  using T = Accumulate<scalar>;

 public:
  Miner(const BatchTriplet& call, const BatchChunk& chunk)
      : call_(call), chunk_(chunk), counts_(call.references.count) {}

  void mine(int64_t r) {
    anchor_ = chunk_.first + r;
    row_ = static_cast<T*>(chunk_.products) + r * count();
    own_ = call_.first_own < 0 ? -1 : call_.first_own + anchor_;
    weight_ = call_.weights == nullptr ? T(1) : static_cast<const T*>(call_.weights)[anchor_];
    form_distances();
    totals_ = {};
    HardPicks<T> picks{-1, -1, T(0), T(0)};
    const bool none = positives_.empty() || negatives() == 0;
    if (none || first_nan_ >= 0) {
      if (!none) poison(picks);
      if (call_.mining != Mining::hard) std::fill_n(row_, count(), none ? T(0) : kNan);
    } else if (call_.mining == Mining::all) {
      all();
    } else if (call_.mining == Mining::semihard) {
      semihard();
    } else {
      picks = hard();
    }
    chunk_.totals[anchor_] = totals_;
    if (call_.mining == Mining::hard) static_cast<HardPicks<T>*>(chunk_.picks)[anchor_] = picks;
  }

 private:
  static constexpr T kNan = std::numeric_limits<T>::quiet_NaN();

  int64_t count() const { return call_.references.count; }
  int64_t negatives() const {
    return count() - static_cast<int64_t>(positives_.size()) - (own_ < 0 ? 0 : 1);
  }
  bool is_negative(int64_t j) const {
    return call_.references.labels[j] != call_.anchors.labels[anchor_];
  }
  T coefficient(T gradient, T d) const {
    return pair_coefficient(weight_ * gradient, d, call_.distance);
  }

  // The row of distances, the positives in the order of references, and the first NaN.
  void form_distances() {
    const BatchRows &x = call_.anchors, &y = call_.references;
    const T norm = static_cast<const T*>(x.norms)[anchor_];
    if (products_to_squares(row_, static_cast<const T*>(y.norms), norm, count())) {
      const scalar* rows = static_cast<const scalar*>(y.data);
      for (int64_t j = 0; j < count(); ++j) {
        if (row_[j] >= 0) continue;
        row_[j] =
            squared_difference<scalar, T>(static_cast<const scalar*>(x.data) + anchor_ * x.stride,
                                          rows + j * y.stride, call_.dim);
      }
    }
    positives_.clear();
    first_nan_ = -1;
    for (int64_t j = 0; j < count(); ++j) {
      row_[j] = distance_from_squared(row_[j], call_.distance);
      if (j == own_) continue;
      if (first_nan_ < 0 && row_[j] != row_[j]) first_nan_ = j;
      if (!is_negative(j)) positives_.push_back({row_[j], j});
    }
  }

  void poison(HardPicks<T>& picks) {
    const auto positives = static_cast<double>(positives_.size());
    const auto others = static_cast<double>(negatives());
    const bool all = call_.mining == Mining::all, hard = call_.mining == Mining::hard;
    const double items = all ? positives * others : hard ? 1 : positives;
    totals_ = {kNan, items, 0, kNan, all ? positives : items, kNan, all ? others : items};
    picks = {first_nan_, first_nan_, kNan, kNan};
  }

  // How many thresholds, of which there are `size`, are not above d.
  int64_t bin_of(const T* sorted, int64_t size, T d) const {
    return std::upper_bound(sorted, sorted + size, d) - sorted;
  }

  void all() {
    const auto size = static_cast<int64_t>(positives_.size());
    sorted_.clear();
    for (const auto& positive : positives_) {
      sorted_.push_back(positive.distance + static_cast<T>(call_.margin));
      totals_.positive_sum += positive.distance;
    }
    std::sort(sorted_.begin(), sorted_.end());
    bins_.assign(size + 1, 0);
    const bool few = size <= kFewPositives;
    if (few) {
      std::fill(counts_.begin(), counts_.end(), 0);
      for (const T threshold : sorted_) count_above(row_, threshold, count(), counts_.data());
    }
    for (int64_t j = 0; j < count(); ++j) {
      if (!is_negative(j)) continue;
      const T d = row_[j];
      const int64_t above = few ? counts_[j] : size - bin_of(sorted_.data(), size, d);
      ++bins_[size - above];
      totals_.negative_sum += d;
      if (above > 0) totals_.loss -= static_cast<double>(above) * d;  // d may be infinite
      row_[j] = coefficient(-static_cast<T>(above), d);
    }
    for (int64_t k = 0, below = 0; k < size; ++k) {
      bins_[k] = below += bins_[k];
      totals_.active += static_cast<double>(below);
      if (below > 0) totals_.loss += static_cast<double>(below) * sorted_[k];
    }
    if (own_ >= 0) row_[own_] = 0;
    for (const auto& [d, j] : positives_) {
      const auto place =
          std::lower_bound(sorted_.begin(), sorted_.end(), d + static_cast<T>(call_.margin));
      row_[j] = coefficient(static_cast<T>(bins_[place - sorted_.begin()]), d);
    }
    totals_.positives = static_cast<double>(size);
    totals_.negatives = static_cast<double>(negatives());
    totals_.items = totals_.positives * totals_.negatives;
  }

  void add_item(const Neighbour<T>& positive, const Neighbour<T>& negative, T& weight) {
    const auto item =
        item_loss(positive.distance - negative.distance + static_cast<T>(call_.margin), call_.soft);
    weight = item.weight;
    totals_.loss += item.loss;
    totals_.items += 1;
    totals_.active += item.loss > 0;
    totals_.positive_sum += positive.distance;
    totals_.positives += 1;
    totals_.negative_sum += negative.distance;
    totals_.negatives += 1;
  }

  void semihard() {
    const auto size = static_cast<int64_t>(positives_.size());
    std::stable_sort(positives_.begin(), positives_.end(),
                     [](const auto& a, const auto& b) { return a.distance < b.distance; });
    sorted_.clear();
    for (const auto& positive : positives_) sorted_.push_back(positive.distance);
    constexpr T infinity = std::numeric_limits<T>::infinity();
    nearest_.assign(size, {infinity, -1});
    Neighbour<T> farthest{-1, -1};
    for (int64_t j = 0; j < count(); ++j) {
      if (!is_negative(j)) continue;
      const T d = row_[j];
      if (d > farthest.distance) farthest = {d, j};
      // The last of the positives that are nearer.
      const int64_t place = std::lower_bound(sorted_.begin(), sorted_.end(), d) - sorted_.begin();
      if (place == 0) continue;
      Neighbour<T>& nearest = nearest_[place - 1];
      if (nearest.index < 0 || d < nearest.distance) nearest = {d, j};
    }
    std::fill_n(row_, count(), T(0));
    Neighbour<T> negative = farthest;
    T shared = 0;  // the weight of the positives that have this negative, summed from the farthest
    for (int64_t k = size - 1; k >= 0; --k) {
      if (nearest_[k].index >= 0 && nearest_[k].index != negative.index) {
        row_[negative.index] = coefficient(-shared, negative.distance);
        negative = nearest_[k];
        shared = 0;
      }
      T weight;
      add_item(positives_[k], negative, weight);
      shared += weight;
      row_[positives_[k].index] = coefficient(weight, positives_[k].distance);
    }
    row_[negative.index] = coefficient(-shared, negative.distance);
  }

  HardPicks<T> hard() {
    Neighbour<T> positive = positives_.front(), negative{T(0), -1};
    for (const auto& other : positives_) {
      if (other.distance > positive.distance) positive = other;
    }
    for (int64_t j = 0; j < count(); ++j) {
      if (!is_negative(j)) continue;
      if (negative.index < 0 || row_[j] < negative.distance) negative = {row_[j], j};
    }
    T weight;
    add_item(positive, negative, weight);
    return {positive.index, negative.index, coefficient(weight, positive.distance),
            coefficient(-weight, negative.distance)};
  }

  const BatchTriplet& call_;
  const BatchChunk& chunk_;
  int64_t anchor_ = 0;
  T* row_ = nullptr;
  int64_t own_ = -1;
  T weight_ = 1;
  int64_t first_nan_ = -1;  // among the distances, or -1
  BatchTotals totals_{};
  std::vector<Neighbour<T>> positives_;
  std::vector<Neighbour<T>> nearest_;  // negatives, by bin
  std::vector<T> sorted_;
  std::vector<int64_t> bins_;
  std::vector<int32_t> counts_;
};

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

void batch_triplet_mine(const BatchTriplet& call, const BatchChunk& chunk, int64_t begin,
                        int64_t end) {
  dispatch_scalar(call.type, [&](auto* null) {
    Miner<std::remove_reference_t<decltype(*null)>> miner(call, chunk);
    for (int64_t r = begin; r < end; ++r) miner.mine(r);
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
