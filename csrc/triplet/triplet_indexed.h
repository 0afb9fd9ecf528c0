// SPDX-License-Identifier: BSD-3-Clause
// The contract of triplet_margin_loss_indexed between its ops and its kernels, beyond that of
// triplet_margin_loss, and the arithmetic of its gradient for every backend.
//
// The forward is that of triplet_margin_loss, whose rows it finds through the indices. For the
// gradient of the embeddings each triplet has three entries, one for each row that it names: the
// triplet's number, plus `rows` for its positive and 2 * `rows` for its negative. Sorted by the row
// that they name, those of a row lie one behind another, a run, and are added in that order.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "triplet/triplet_formula.h"

namespace fused_ops {

// An entry is sorted by a key: the row that it names and, in the lower bits, its number.
struct TripletEntryBits {
  int row;
  int entry;

  // A sort goes through one bit or more.
  explicit TripletEntryBits(const TripletInputs& in)
      : row(std::max(1, bits_of(in.embeddings))), entry(bits_of(3 * in.rows)) {}

  FUSED_OPS_HOST_DEVICE uint64_t key(int64_t row, int64_t number) const {
    return static_cast<uint64_t>(row) << entry | static_cast<uint64_t>(number);
  }
  FUSED_OPS_HOST_DEVICE int64_t row_of(uint64_t key) const {
    return static_cast<int64_t>(key >> entry);
  }
  FUSED_OPS_HOST_DEVICE int64_t entry_of(uint64_t key) const {
    return static_cast<int64_t>(key & ((uint64_t{1} << entry) - 1));
  }

 private:
  static int bits_of(int64_t count) { return std::bit_width(static_cast<uint64_t>(count - 1)); }
};

struct TripletIndexedBackward {
  TripletBackward backward;  // whose `gradients` are unused
  TripletEntryBits bits;
  const uint64_t* order;  // (3 * rows), the keys of the entries in ascending order
  void* gradient;         // (embeddings, dim) contiguous, zero where no entry names a row
};

// A summand of a row's gradient: coefficient * phi(x) with x = sign * (row - other row) + eps.
template <typename T>
struct TripletTerm {
  int64_t other;
  T sign;
  T distance;
  T coefficient;
};

// What an entry adds to the gradient of the row that it names.
template <typename T>
struct TripletEntry {
  int64_t row;
  int terms;
  TripletTerm<T> term[2];
};

// The row that an entry names.
FUSED_OPS_HOST_DEVICE inline int64_t entry_row(const TripletInputs& in, int64_t entry) {
  return embedding_row(in.indices[entry], in.embeddings);
}

// `upstream(triplet)` is the upstream gradient of a triplet's loss.
template <Norm norm, typename T, typename Upstream>
FUSED_OPS_HOST_DEVICE inline TripletEntry<T> load_entry(const TripletBackward& params,
                                                        int64_t entry, const Upstream& upstream) {
  const TripletInputs& in = params.inputs;
  const int place = (entry >= in.rows) + (entry >= 2 * in.rows);
  const int64_t triplet = entry - place * in.rows;
  const auto row_at = [&](int of) { return entry_row(in, of * in.rows + triplet); };
  const auto state = load_row_state<norm>(
      static_cast<const T*>(params.state) + triplet * state_columns(norm, in.swap), in.swap);
  const T unclamped = unclamped_loss(state.distances, static_cast<T>(params.margin), in.swap);
  if (is_inactive(unclamped)) return {row_at(place), 0, {}};
  const TripletDistances<T>& d = state.distances;
  const TripletCoefficients<T> c = coefficients<norm>(upstream(triplet), state, unclamped, in);
  const int64_t anchor = row_at(0), positive = row_at(1), negative = row_at(2);
  const int terms = place == 0 || in.swap ? 2 : 1;
  if (place == 0) {
    return {anchor,
            terms,
            {{positive, T(1), d.positive, c.positive}, {negative, T(1), d.negative, c.negative}}};
  }
  if (place == 1) {
    return {positive,
            terms,
            {{anchor, T(-1), d.positive, -c.positive}, {negative, T(1), d.swap, c.swap}}};
  }
  return {negative,
          terms,
          {{anchor, T(-1), d.negative, -c.negative}, {positive, T(-1), d.swap, -c.swap}}};
}

}  // namespace fused_ops
