// SPDX-License-Identifier: BSD-3-Clause
// The mining on the CPU.
//
// For "all" a positive has a threshold t = d_ip + margin and takes part in as many triplets as
// there are negatives below it, a negative in as many as there are thresholds above it. The loss is
// the sum of count * (d + margin) over the positives minus that of count * d over the negatives. Up
// to kFewPositives each goes through the whole row, in vectors. More are sorted: a negative
// searches its place and counts itself into that bin. For "semihard" each bin keeps its nearest
// negative, and the minimum from the back is what a positive looks for.
//
// Sums run over a fixed number of lanes, so every instruction set gives the same bits.

#include "batch_triplet/batch_triplet_kernel_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "batch_triplet/batch_triplet_formula.h"
#include "common/clones.h"
#include "common/cpu_scalar.h"

namespace fused_ops {
namespace {

constexpr int64_t kFewPositives =
    256;  // a search costs as much as that many comparisons in vectors
constexpr int kSumLanes = 8;

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

FUSED_OPS_INLINE float root(float x) { return __builtin_sqrtf(x); }
FUSED_OPS_INLINE double root(double x) { return __builtin_sqrt(x); }

// The sum of `value(j)` for j < count.
template <typename Value>
FUSED_OPS_INLINE double sum_in_lanes(int64_t count, const Value& value) {
  double lanes[kSumLanes] = {};
  int64_t j = 0;
  for (; j + kSumLanes <= count; j += kSumLanes) {
    for (int lane = 0; lane < kSumLanes; ++lane) lanes[lane] += value(j + lane);
  }
  for (; j < count; ++j) lanes[j % kSumLanes] += value(j);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// Distances in the place of their squares, and a copy of them. Returns whether one is NaN.
template <typename T>
FUSED_OPS_CLONES bool squares_to_distances(T* row, T* copy, int64_t count, BatchDistance distance) {
  if (distance == BatchDistance::euclidean) {
    for (int64_t j = 0; j < count; ++j) row[j] = root(row[j]);
  } else if (distance == BatchDistance::half_squared) {
    for (int64_t j = 0; j < count; ++j) row[j] /= 2;
  }
  int nan = 0;
#pragma GCC ivdep
  for (int64_t j = 0; j < count; ++j) {
    copy[j] = row[j];
    nan |= row[j] != row[j];
  }
  return nan != 0;
}

template <typename T>
FUSED_OPS_CLONES double sum_of(const T* values, int64_t count) {
  return sum_in_lanes(
      count, [&](int64_t j) FUSED_OPS_INLINE_LAMBDA { return static_cast<double>(values[j]); });
}

// How many distances are below the threshold; counts it in each of them.
template <typename T>
FUSED_OPS_CLONES int32_t count_below(const T* negatives, T threshold, int64_t count,
                                     int32_t* above) {
  int32_t found = 0;
#pragma GCC ivdep
  for (int64_t j = 0; j < count; ++j) {
    const int32_t below = negatives[j] < threshold;
    above[j] += below;
    found += below;
  }
  return found;
}

// The coefficients of negatives that have `above` thresholds above them; returns their part of the
// loss. An infinite distance has none. (It is asked, not `above`: GCC 12 vectorises a choice
// between doubles by an int32 wrongly.)
template <typename T>
FUSED_OPS_CLONES double count_to_coefficients(T* row, const int32_t* above, T weight, int64_t count,
                                              BatchDistance distance) {
  const double loss = sum_in_lanes(count, [&](int64_t j) FUSED_OPS_INLINE_LAMBDA {
    const T d = row[j] < std::numeric_limits<T>::infinity() ? row[j] : T(0);
    return static_cast<double>(above[j]) * static_cast<double>(d);
  });
  if (distance == BatchDistance::euclidean) {
#pragma GCC ivdep
    for (int64_t j = 0; j < count; ++j) {
      const T c = -weight * static_cast<T>(above[j]) / (row[j] == 0 ? T(1) : row[j]);
      row[j] = row[j] == 0 ? T(0) : c;
    }
  } else {
    const T factor = distance == BatchDistance::squared ? -2 * weight : -weight;
    for (int64_t j = 0; j < count; ++j) row[j] = factor * static_cast<T>(above[j]);
  }
  return loss;
}

// The smallest distance above `bound`, or infinity.
template <typename T>
FUSED_OPS_CLONES T least_above(const T* negatives, T bound, int64_t count) {
  constexpr int kLanes = 64 / sizeof(T);
  constexpr T infinity = std::numeric_limits<T>::infinity();
  T lanes[kLanes];
  std::fill_n(lanes, kLanes, infinity);
  const auto visit = [&](int lane, T d) FUSED_OPS_INLINE_LAMBDA {
    const T other = d > bound ? d : infinity;
    lanes[lane] = other < lanes[lane] ? other : lanes[lane];
  };
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) visit(lane, negatives[j + lane]);
  }
  for (; j < count; ++j) visit(0, negatives[j]);
  return *std::min_element(lanes, lanes + kLanes);
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
      : call_(call), chunk_(chunk), row_negatives_(count()), above_(count()) {
    for (int64_t j = 0; j < count(); ++j) by_class_.push_back({call.references.labels[j], j});
    std::sort(by_class_.begin(), by_class_.end());
  }

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
    if (own_ >= 0) row_[own_] = 0;
    const bool nan = squares_to_distances(row_, row_negatives_.data(), count(), call_.distance);
    first_nan_ = nan ? std::find_if(row_, row_ + count(), [](T d) { return d != d; }) - row_ : -1;
    positives_.clear();
    const auto [first, last] = class_of(x.labels[anchor_]);
    for (auto next = first; next != last; ++next) {
      row_negatives_[next->second] = 0;
      if (next->second != own_) positives_.push_back({row_[next->second], next->second});
    }
    negative_sum_ = sum_of(row_negatives_.data(), count());
    for (auto next = first; next != last; ++next) {
      row_negatives_[next->second] = std::numeric_limits<T>::infinity();
    }
  }

  // The references with a label, in their order.
  auto class_of(int64_t label) const {
    using Entry = std::pair<int64_t, int64_t>;
    const auto first = std::lower_bound(by_class_.begin(), by_class_.end(), Entry(label, 0));
    return std::pair(first, std::find_if(first, by_class_.end(),
                                         [&](const Entry& entry) { return entry.first != label; }));
  }

  void poison(HardPicks<T>& picks) {
    const auto positives = static_cast<double>(positives_.size());
    const auto others = static_cast<double>(negatives());
    const bool all = call_.mining == Mining::all, hard = call_.mining == Mining::hard;
    const double items = all ? positives * others : hard ? 1 : positives;
    totals_ = {kNan, items, 0, kNan, all ? positives : items, kNan, all ? others : items};
    picks = {first_nan_, first_nan_, kNan, kNan};
  }

  // The negative at a distance that is known to be that of one.
  Neighbour<T> negative_at(T d) const {
    return {d, std::find(row_negatives_.begin(), row_negatives_.end(), d) - row_negatives_.begin()};
  }

  Neighbour<T> farthest_negative() const {
    Neighbour<T> farthest{-1, -1};
    for (int64_t j = 0; j < count(); ++j) {
      if (is_negative(j) && row_[j] > farthest.distance) farthest = {row_[j], j};
    }
    return farthest;
  }

  void all() {
    const auto size = static_cast<int64_t>(positives_.size());
    const auto margin = static_cast<T>(call_.margin);
    std::fill(above_.begin(), above_.end(), 0);
    below_.assign(size, 0);
    if (size <= kFewPositives) {
      for (int64_t k = 0; k < size; ++k) {
        below_[k] = count_below(row_negatives_.data(), positives_[k].distance + margin, count(),
                                above_.data());
      }
    } else {
      count_by_searching(margin);
    }
    totals_.loss = -count_to_coefficients(row_, above_.data(), weight_, count(), call_.distance);
    for (int64_t k = 0; k < size; ++k) {
      const auto [d, j] = positives_[k];
      const auto below = static_cast<double>(below_[k]);
      row_[j] = coefficient(static_cast<T>(below_[k]), d);
      totals_.positive_sum += d;
      totals_.active += below;
      if (below > 0) totals_.loss += below * static_cast<double>(d);
    }
    totals_.positives = static_cast<double>(size);
    totals_.negative_sum = negative_sum_;
    totals_.negatives = static_cast<double>(negatives());
    totals_.items = totals_.positives * totals_.negatives;
    totals_.loss = counted_loss(totals_, static_cast<T>(call_.margin));
  }

  void count_by_searching(T margin) {
    const auto size = static_cast<int64_t>(positives_.size());
    sorted_.clear();
    for (const auto& positive : positives_) sorted_.push_back(positive.distance + margin);
    std::sort(sorted_.begin(), sorted_.end());
    bins_.assign(size + 1, 0);
    for (int64_t j = 0; j < count(); ++j) {
      if (!is_negative(j)) continue;
      const int64_t bin =
          std::upper_bound(sorted_.begin(), sorted_.end(), row_[j]) - sorted_.begin();
      above_[j] = static_cast<int32_t>(size - bin);
      ++bins_[bin];
    }
    for (int64_t k = 1; k < size; ++k) bins_[k] += bins_[k - 1];
    for (int64_t k = 0; k < size; ++k) {
      const T threshold = positives_[k].distance + margin;
      below_[k] =
          bins_[std::lower_bound(sorted_.begin(), sorted_.end(), threshold) - sorted_.begin()];
    }
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
    constexpr T infinity = std::numeric_limits<T>::infinity();
    nearest_.assign(size, {infinity, -1});  // of a positive, or of those before it that are as near
    if (size <= kFewPositives) {
      Neighbour<T> nearest{-1, -1};
      for (int64_t k = 0; k < size; ++k) {
        const T d = positives_[k].distance;
        if (nearest.distance <= d) {
          const T least = least_above(row_negatives_.data(), d, count());
          // None, or infinitely far away as the farthest is then too.
          if (least == infinity) break;
          nearest = negative_at(least);
        }
        nearest_[k] = nearest;
      }
    } else {
      search_nearest();
    }
    const Neighbour<T> farthest = farthest_negative();
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

  void search_nearest() {
    sorted_.clear();
    for (const auto& positive : positives_) sorted_.push_back(positive.distance);
    for (int64_t j = 0; j < count(); ++j) {
      if (!is_negative(j)) continue;
      const T d = row_[j];
      // The last of the positives that are nearer.
      const int64_t place = std::lower_bound(sorted_.begin(), sorted_.end(), d) - sorted_.begin();
      if (place == 0) continue;
      Neighbour<T>& nearest = nearest_[place - 1];
      if (nearest.index < 0 || d < nearest.distance) nearest = {d, j};
    }
  }

  HardPicks<T> hard() {
    Neighbour<T> positive = positives_.front();
    for (const auto& other : positives_) {
      if (other.distance > positive.distance) positive = other;
    }
    const T least = least_above(row_negatives_.data(), T(-1), count());
    // Where all are infinitely far away, any search but this would find one that is none.
    const Neighbour<T> negative = std::isinf(least) ? farthest_negative() : negative_at(least);
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
  std::vector<Neighbour<T>> nearest_;
  std::vector<T> row_negatives_;  // the row, with infinity for what is no negative
  double negative_sum_ = 0;
  std::vector<int32_t> above_;  // thresholds above each reference, if it is a negative
  std::vector<int64_t> below_;  // negatives below each positive's threshold
  std::vector<T> sorted_;
  std::vector<int64_t> bins_;
  std::vector<std::pair<int64_t, int64_t>> by_class_;  // label and index of the references
};

}  // namespace

void batch_triplet_mine(const BatchTriplet& call, const BatchChunk& chunk, int64_t begin,
                        int64_t end) {
  dispatch_scalar(call.type, [&](auto* null) {
    Miner<std::remove_reference_t<decltype(*null)>> miner(call, chunk);
    for (int64_t r = begin; r < end; ++r) miner.mine(r);
  });
}

}  // namespace fused_ops
