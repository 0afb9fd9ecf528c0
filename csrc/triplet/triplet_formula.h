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

// `is_absolute` tells norm two of a single element, x / |x|, from norm one, sign(x): in torch the
// former is NaN of NaN and of inf. At distance 0 norm two has gradient 0, but of an upstream
// gradient that is no number, which must not get lost.
template <Norm norm, typename T>
FUSED_OPS_HOST_DEVICE inline T coefficient(T upstream, T distance, T ties, bool is_absolute) {
  if constexpr (norm == Norm::two) {
    return distance == T(0) ? upstream * T(0) : upstream / distance;
  }
  if constexpr (norm == Norm::infinity) return upstream / ties;
  const T no_number = distance - distance;  // where the distance is infinite or NaN, else 0
  return is_absolute && no_number != T(0) ? no_number : upstream;
}

// What a row of the state holds, by name.
template <typename T>
struct TripletRowState {
  TripletDistances<T> distances;
  TripletDistances<T> ties;  // of p = inf
};

template <Norm norm, typename T>
FUSED_OPS_HOST_DEVICE inline TripletRowState<T> load_row_state(const T* state, bool swap) {
  TripletRowState<T> row{{state[0], state[1], swap ? state[2] : T(0)}, {}};
  if constexpr (norm == Norm::infinity) {
    const T* ties = state + (swap ? 3 : 2);
    row.ties = {ties[0], ties[1], swap ? ties[2] : T(0)};
  }
  return row;
}

template <Norm norm, typename T>
FUSED_OPS_HOST_DEVICE inline void store_row_state(const TripletRowState<T>& row, bool swap,
                                                  T* state) {
  const auto store = [&](const TripletDistances<T>& of, T* to) {
    to[0] = of.positive;
    to[1] = of.negative;
    if (swap) to[2] = of.swap;
  };
  store(row.distances, state);
  if constexpr (norm == Norm::infinity) store(row.ties, state + (swap ? 3 : 2));
}

template <Norm norm, typename T>
FUSED_OPS_HOST_DEVICE inline TripletCoefficients<T> coefficients(T upstream,
                                                                 const TripletRowState<T>& row,
                                                                 T unclamped,
                                                                 const TripletInputs& in) {
  const TripletDistances<T>& d = row.distances;
  const T active = unclamped >= T(0) ? upstream : T(0);
  T negative = active;
  T nearer = T(0);  // of the swap. Not by products with shares, for an infinite upstream's 0 * inf
  if (in.swap && d.negative == d.swap) {
    negative = nearer = active / T(2);
  } else if (in.swap && d.negative > d.swap) {
    negative = T(0);
    nearer = active;
  }
  return {coefficient<norm>(active, d.positive, row.ties.positive, in.is_absolute),
          -coefficient<norm>(negative, d.negative, row.ties.negative, in.is_absolute),
          -coefficient<norm>(nearer, d.swap, row.ties.swap, in.is_absolute)};
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
