// SPDX-License-Identifier: BSD-3-Clause
// The arithmetic of one row, for every backend. `triplet.h` names the symbols.
//
// With g the upstream gradient of the row's loss (divided by the rows for a mean), phi(x) the
// gradient of d(x), and (a, b) the shares of d(v) and d(w) in the nearest negative distance:
//
//   grad_anchor   = g * (phi(u) - a * phi(v))
//   grad_positive = g * (-phi(u) - b * phi(w))
//   grad_negative = g * (a * phi(v) + b * phi(w))
//
// as torch has it: a row counts when unclamped >= 0, so also exactly on the hinge; equal distances
// share half and half; phi is 0 at distance 0; elements that tie for the maximum share it.

#pragma once

#include "common/host_device.h"
#include "triplet/triplet.h"

namespace fused_ops {

template <typename T>
struct TripletDistances {
  T positive;  // d(u)
  T negative;  // d(v)
  T swap;      // d(w)
};

// Factors of phi(u), phi(v) and phi(w) in the gradients, the norm's divisor included.
template <typename T>
struct TripletCoefficients {
  T positive;
  T negative;
  T swap;
};

template <typename T>
FUSED_OPS_HOST_DEVICE inline T unclamped_loss(const TripletDistances<T>& d, T margin, bool swap) {
  T nearest = d.negative;
  // Written so that NaN in either distance wins, which fmin would drop.
  if (swap && !(d.negative < d.swap) && d.negative == d.negative) nearest = d.swap;
  return margin + d.positive - nearest;
}

template <typename T>
FUSED_OPS_HOST_DEVICE inline T clamped_loss(T unclamped) {
  return unclamped < T(0) ? T(0) : unclamped;  // NaN stays NaN
}

// A row below the hinge has zero gradient and need not be read. A NaN row does have to be: its
// gradient is NaN wherever torch's is, which loss scalers look for.
template <typename T>
FUSED_OPS_HOST_DEVICE inline bool is_inactive(T unclamped) {
  return unclamped < T(0);
}

template <Norm norm, typename T>
FUSED_OPS_HOST_DEVICE inline T coefficient(T upstream, T distance, T ties) {
  if constexpr (norm == Norm::two) return distance == T(0) ? T(0) : upstream / distance;
  if constexpr (norm == Norm::infinity) return upstream / ties;
  return upstream;
}

template <Norm norm, typename T>
FUSED_OPS_HOST_DEVICE inline TripletCoefficients<T> coefficients(T upstream, const T* state,
                                                                 bool swap) {
  const T active = state[0] >= T(0) ? upstream : T(0);
  T negative_share = T(1);
  T swap_share = T(0);
  if (swap) {
    swap_share = state[2] == state[3] ? T(0.5) : state[2] > state[3] ? T(1) : T(0);
    negative_share = T(1) - swap_share;
  }
  const T* ties = norm == Norm::infinity ? state + 4 : state;  // read for infinity only
  return {coefficient<norm>(active, state[1], ties[0]),
          -coefficient<norm>(active * negative_share, state[2], ties[1]),
          -coefficient<norm>(active * swap_share, state[3], ties[2])};
}

// coefficient * phi(x), less the divisor that the coefficient holds.
template <Norm norm, typename T>
FUSED_OPS_HOST_DEVICE inline T scaled_phi(T x, T distance, T coefficient) {
  if constexpr (norm == Norm::two) return x * coefficient;
  const T sign = x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0);
  if constexpr (norm == Norm::one) return sign * coefficient;
  const T magnitude = x < T(0) ? -x : x;
  return magnitude == distance ? sign * coefficient : T(0);
}

}  // namespace fused_ops
