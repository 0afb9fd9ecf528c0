// SPDX-License-Identifier: BSD-3-Clause
// The bandwidth rules and the kernel's weights, for every backend.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "common/host_device.h"
#include "svgd/svgd.h"

namespace fused_ops {

// 0-based ranks among the pairs i < j of the two middle values whose mean is the median, or equal;
// -1 stands for a zero of the diagonal.
struct MedianRanks {
  int64_t lower;
  int64_t upper;
};

inline MedianRanks median_ranks(BandwidthRule rule, int64_t count) {
  if (rule == BandwidthRule::paper) {  // over the pairs i < j
    const int64_t pairs = count * (count - 1) / 2;
    return {pairs > 0 ? (pairs - 1) / 2 : -1, pairs > 0 ? pairs / 2 : -1};
  }
  // Over all N * N: the N zeros of the diagonal first, then each pair twice.
  const int64_t total = count * count;
  const auto pair_rank = [&](int64_t m) { return m < count ? int64_t{-1} : (m - count) / 2; };
  const int64_t lower = pair_rank((total - 1) / 2);
  return {lower, rule == BandwidthRule::median ? lower : pair_rank(total / 2)};
}

// The rank that a search looks for: the lower middle value's or, where that is of the diagonal, the
// upper one's.
inline int64_t sought_rank(const MedianRanks& ranks) {
  return ranks.lower >= 0 ? ranks.lower : ranks.upper >= 0 ? ranks.upper : 0;
}

// Whether two distances of pairs, not one, make the median.
FUSED_OPS_HOST_DEVICE inline bool mean_of_two(const MedianRanks& ranks) {
  return ranks.lower >= 0 && ranks.upper > ranks.lower;
}

// What h is the middle of, divided by this.
FUSED_OPS_HOST_DEVICE inline double bandwidth_divisor(BandwidthRule rule, int64_t count) {
  const double particles = static_cast<double>(count);
  return rule == BandwidthRule::paper       ? 2 * std::log(particles)
         : rule == BandwidthRule::reference ? 2 * std::log(particles + 1)
         : std::log(particles) > 1          ? std::log(particles)
                                            : 1;
}

// h from the two middle squared distances and, where those are zero, from the mean squared distance
// of the pairs. 1 where that is zero too. Formed in float64 and rounded once.
template <typename T>
FUSED_OPS_HOST_DEVICE inline T bandwidth_by_divisor(BandwidthRule rule, double divisor,
                                                    double lower, double upper, double mean) {
  double middle = lower;
  if (lower != upper) {
    if (rule == BandwidthRule::paper) {  // the median of distances, not of their squares
      const double distance = (std::sqrt(lower) + std::sqrt(upper)) / 2;
      middle = distance * distance;
    } else {
      middle = lower / 2 + upper / 2;
    }
  }
  if (middle == 0) middle = mean;
  if (middle == 0) return T(1);
  const T bandwidth = static_cast<T>(middle / divisor);
  return bandwidth == T(0) ? std::numeric_limits<T>::denorm_min() : bandwidth;
}

template <typename T>
FUSED_OPS_HOST_DEVICE inline T bandwidth_of(BandwidthRule rule, int64_t count, double lower,
                                            double upper, double mean) {
  return bandwidth_by_divisor<T>(rule, bandwidth_divisor(rule, count), lower, upper, mean);
}

// Whether sum_j K_ij (s_j + c (x_i - x_j)) may be formed as sum_j K_ij (s_j - c (x_j - m)) and
// c (x_i - m) sum_j K_ij around the mean m, which cancels where |x - m| is large beside sqrt(h).
constexpr float kMaxCentredRatio = 64;
template <typename T>
FUSED_OPS_HOST_DEVICE inline bool may_centre(T max_squared_norm, T bandwidth) {
  return max_squared_norm <= T(kMaxCentredRatio) * bandwidth;
}

// What a kernel needs of h.
template <typename T>
struct KernelScale {
  T half_inverse;  // 1 / (2h)
  T slope;         // rbf: K = 2^(-slope d2). Rounded once, for its error is that of all pairs alike
                   // and does not average out as theirs do
  T slope_rest;    // what that rounding left off
  T repulsion;     // repulsion / h, for imq half of it

  FUSED_OPS_HOST_DEVICE KernelScale(SteinKernel kernel, T bandwidth, T strength) {
    // A subnormal h has no finite inverse; the largest number keeps 0 * (1/h) from being NaN.
    const T most = std::numeric_limits<T>::max();
    const T inverse = T(1) / bandwidth > most ? most : T(1) / bandwidth;
    half_inverse = inverse / T(2);
    constexpr double half_log2_e = 0.72134752044448170368;
    const double exact = half_log2_e / static_cast<double>(bandwidth);
    const bool finite = exact <= static_cast<double>(most);
    slope = finite ? static_cast<T>(exact) : most;
    slope_rest = finite ? static_cast<T>(exact - static_cast<double>(slope)) : T(0);
    repulsion = strength * (kernel == SteinKernel::imq ? half_inverse : inverse);
  }
};

}  // namespace fused_ops
