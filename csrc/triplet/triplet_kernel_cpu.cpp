// SPDX-License-Identifier: BSD-3-Clause
// CPU kernels of triplet_margin_loss.
//
// The inner loops run over a fixed number of lanes with no floating-point contraction, so every
// instruction set that FUSED_OPS_CLONES builds them for gives the same bits.

#include "triplet/triplet_kernel_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "common/clones.h"
#include "triplet/triplet_formula.h"
#include "triplet/triplet_types_cpu.h"

namespace fused_ops {
namespace {

template <typename T>
constexpr int kLanes = 128 / sizeof(T);  // two AVX-512 registers

constexpr int64_t kBlock = 512;  // elements whose gradients are formed at a time

// |x|_p of a chunk before the root is taken, for u, v and w; for p = inf also the ties.
template <typename T>
struct PartialDistances {
  T value[3]{};
  T ties[3]{};
};

template <Norm norm, typename T>
FUSED_OPS_INLINE T accumulated(T sum, T x) {
  if constexpr (norm == Norm::two) return sum + x * x;
  const T magnitude = x < T(0) ? -x : x;
  if constexpr (norm == Norm::one) return sum + magnitude;
  return magnitude > sum || magnitude != magnitude ? magnitude : sum;  // NaN enters and stays
}

template <Norm norm, typename T>
FUSED_OPS_INLINE T merged(T a, T b) {
  if constexpr (norm == Norm::infinity) return accumulated<norm>(a, b);
  return a + b;
}

// Halves into a new array each time: in place, GCC goes through memory (a third slower at dim 128).
template <Norm norm, int count, typename T>
FUSED_OPS_INLINE T merged_lanes(const T (&lanes)[count]) {
  if constexpr (count == 1) {
    return lanes[0];
  } else {
    T halves[count / 2];
    for (int lane = 0; lane < count / 2; ++lane) {
      halves[lane] = merged<norm>(lanes[lane], lanes[lane + count / 2]);
    }
    return merged_lanes<norm>(halves);
  }
}

// Calls `visit(lane, u, v, w)` for each element; w only where the distance swap wants it.
template <bool swap, typename scalar, typename T, typename Visit>
FUSED_OPS_INLINE void for_each_difference(const scalar* anchor, const scalar* positive,
                                          const scalar* negative, int64_t count, T eps,
                                          Visit visit) {
  const auto visit_lane = [&](int64_t first, int lane) FUSED_OPS_INLINE_LAMBDA {
    const T a = static_cast<T>(anchor[first + lane]);
    const T p = static_cast<T>(positive[first + lane]);
    const T n = static_cast<T>(negative[first + lane]);
    visit(lane, a - p + eps, a - n + eps, swap ? p - n + eps : T(0));
  };
  int64_t first = 0;
  for (; first + kLanes<T> <= count; first += kLanes<T>) {
    for (int lane = 0; lane < kLanes<T>; ++lane) visit_lane(first, lane);
  }
  for (int lane = 0; lane < count - first; ++lane) visit_lane(first, lane);
}

template <Norm norm, bool swap, typename scalar, typename T>
FUSED_OPS_INLINE void add_distances(const scalar* anchor, const scalar* positive,
                                    const scalar* negative, int64_t count, T eps,
                                    PartialDistances<T>& result) {
  T u_lanes[kLanes<T>] = {}, v_lanes[kLanes<T>] = {}, w_lanes[kLanes<T>] = {};
  for_each_difference<swap>(anchor, positive, negative, count, eps,
                            [&](int lane, T u, T v, T w) FUSED_OPS_INLINE_LAMBDA {
                              u_lanes[lane] = accumulated<norm>(u_lanes[lane], u);
                              v_lanes[lane] = accumulated<norm>(v_lanes[lane], v);
                              if (swap) w_lanes[lane] = accumulated<norm>(w_lanes[lane], w);
                            });
  result.value[0] = merged_lanes<norm>(u_lanes);
  result.value[1] = merged_lanes<norm>(v_lanes);
  if (swap) result.value[2] = merged_lanes<norm>(w_lanes);
}

template <bool swap, typename scalar, typename T>
FUSED_OPS_INLINE void count_ties(const scalar* anchor, const scalar* positive,
                                 const scalar* negative, int64_t count, T eps,
                                 PartialDistances<T>& result) {
  int32_t u_lanes[kLanes<T>] = {}, v_lanes[kLanes<T>] = {}, w_lanes[kLanes<T>] = {};
  const T u_norm = result.value[0], v_norm = result.value[1], w_norm = result.value[2];
  for_each_difference<swap>(anchor, positive, negative, count, eps,
                            [&](int lane, T u, T v, T w) FUSED_OPS_INLINE_LAMBDA {
                              u_lanes[lane] += (u < T(0) ? -u : u) == u_norm;
                              v_lanes[lane] += (v < T(0) ? -v : v) == v_norm;
                              w_lanes[lane] += (w < T(0) ? -w : w) == w_norm;
                            });
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    result.ties[0] += static_cast<T>(u_lanes[lane]);
    result.ties[1] += static_cast<T>(v_lanes[lane]);
    result.ties[2] += static_cast<T>(w_lanes[lane]);
  }
}

template <typename scalar, Norm norm, typename T>
FUSED_OPS_CLONES void chunk_distances(const scalar* anchor, const scalar* positive,
                                      const scalar* negative, int64_t count, T eps, bool swap,
                                      bool with_ties, PartialDistances<T>& result) {
  if (swap) {
    add_distances<norm, true>(anchor, positive, negative, count, eps, result);
    if (with_ties) count_ties<true>(anchor, positive, negative, count, eps, result);
  } else {
    add_distances<norm, false>(anchor, positive, negative, count, eps, result);
    if (with_ties) count_ties<false>(anchor, positive, negative, count, eps, result);
  }
}

template <Norm norm, typename T>
void merge(PartialDistances<T>& into, const PartialDistances<T>& other) {
  for (int i = 0; i < 3; ++i) {
    const T value = merged<norm>(into.value[i], other.value[i]);
    if constexpr (norm == Norm::infinity) {
      into.ties[i] = (into.value[i] == value ? into.ties[i] : T(0)) +
                     (other.value[i] == value ? other.ties[i] : T(0));
    }
    into.value[i] = value;
  }
}

// Where a row's elements stand in the inputs.
template <typename scalar>
struct RowPointers {
  RowPointers(const TripletInputs& in, int64_t row, int64_t offset) {
    const auto at = [&](const void* input, int64_t stride, int place) {
      const int64_t input_row =
          in.indices == nullptr ? row
                                : embedding_row(in.indices[place * in.rows + row], in.embeddings);
      return static_cast<const scalar*>(input) + input_row * stride + offset;
    };
    anchor = at(in.anchor, in.anchor_stride, 0);
    positive = at(in.positive, in.positive_stride, 1);
    negative = at(in.negative, in.negative_stride, 2);
  }

  const scalar* anchor;
  const scalar* positive;
  const scalar* negative;
};

// Scratch memory: the loss of each row, then, where rows have several chunks, their distances.
template <typename T>
struct Scratch {
  Scratch(const TripletForward& params, void* memory)
      : losses(static_cast<T*>(memory)),
        chunks(reinterpret_cast<PartialDistances<T>*>(losses + params.inputs.rows)) {}

  static int64_t bytes(const TripletForward& params) {
    const int64_t chunks = triplet_chunks(params.inputs.dim);
    const int64_t per_row = sizeof(T) + (chunks > 1 ? chunks * sizeof(PartialDistances<T>) : 0);
    return params.inputs.rows * per_row;
  }

  T* losses;
  PartialDistances<T>* chunks;
};

template <typename scalar, typename T>
void store_loss(const TripletForward& params, int64_t index, T loss) {
  if (params.accumulate_loss) {
    static_cast<T*>(params.loss)[index] = loss;
  } else {
    static_cast<scalar*>(params.loss)[index] = static_cast<scalar>(loss);
  }
}

template <typename scalar, Norm norm, typename T>
void finish_row(const TripletForward& params, int64_t row, const PartialDistances<T>& d,
                T* losses) {
  const auto root = [](T value) { return norm == Norm::two ? std::sqrt(value) : value; };
  const bool swap = params.inputs.swap;
  const TripletRowState<T> state{{root(d.value[0]), root(d.value[1]), root(d.value[2])},
                                 {d.ties[0], d.ties[1], d.ties[2]}};
  const T unclamped = unclamped_loss(state.distances, static_cast<T>(params.margin), swap);
  if (params.state != nullptr) {
    store_row_state<norm>(state, swap,
                          static_cast<T*>(params.state) + row * state_columns(norm, swap));
  }
  losses[row] = clamped_loss(unclamped);
  if (params.reduction == Reduction::none) store_loss<scalar>(params, row, losses[row]);
}

template <typename scalar, Norm norm>
void forward_items(const TripletForward& params, void* memory, int64_t begin, int64_t end) {
  using T = CpuAccumulate<scalar>;
  const TripletInputs& in = params.inputs;
  const Scratch<T> scratch(params, memory);
  const int64_t chunks = triplet_chunks(in.dim);
  const bool with_ties = norm == Norm::infinity && params.state != nullptr;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / chunks;
    const int64_t offset = item % chunks * kTripletChunk;
    const RowPointers<scalar> at(in, row, offset);
    PartialDistances<T> distances;
    chunk_distances<scalar, norm>(at.anchor, at.positive, at.negative,
                                  std::min(kTripletChunk, in.dim - offset), static_cast<T>(in.eps),
                                  in.swap, with_ties, distances);
    if (chunks == 1) {
      finish_row<scalar, norm>(params, row, distances, scratch.losses);
    } else {
      scratch.chunks[item] = distances;
    }
  }
}

// By halves, so that errors grow with the logarithm of `count` only.
template <typename T>
double sum_of(const T* values, int64_t count) {
  constexpr int64_t kShort = 128;
  if (count > kShort) {
    const int64_t half = count / 2;
    return sum_of(values, half) + sum_of(values + half, count - half);
  }
  double sums[8] = {};  // independent chains, so that additions overlap
  for (int64_t i = 0; i < count; ++i) sums[i % 8] += values[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <typename scalar, Norm norm>
void forward_finish(const TripletForward& params, void* memory) {
  using T = CpuAccumulate<scalar>;
  const TripletInputs& in = params.inputs;
  const Scratch<T> scratch(params, memory);
  const int64_t chunks = triplet_chunks(in.dim);
  if (params.header != nullptr) *params.header = {};  // gradients are formed by the backward only
  for (int64_t row = 0; chunks > 1 && row < in.rows; ++row) {
    // By twos, or roundings that do not cancel would add up over a long row.
    PartialDistances<T>* const of_row = scratch.chunks + row * chunks;
    for (int64_t apart = 1; apart < chunks; apart *= 2) {
      for (int64_t chunk = 0; chunk + apart < chunks; chunk += 2 * apart) {
        merge<norm>(of_row[chunk], of_row[chunk + apart]);
      }
    }
    finish_row<scalar, norm>(params, row, of_row[0], scratch.losses);
  }
  if (params.reduction == Reduction::none) return;
  double sum = sum_of(scratch.losses, in.rows);
  if (params.reduction == Reduction::mean) sum /= static_cast<double>(in.rows);
  store_loss<scalar>(params, 0, static_cast<T>(sum));
}

template <Norm norm, bool swap, typename scalar, typename T>
FUSED_OPS_INLINE void store_gradients(const scalar* anchor, const scalar* positive,
                                      const scalar* negative, int64_t count, T eps,
                                      const TripletDistances<T>& d, const TripletCoefficients<T>& c,
                                      scalar* grad_anchor, scalar* grad_positive,
                                      scalar* grad_negative) {
  scalar unwanted[kBlock];  // takes what nobody asked for, so that there is one loop
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    scalar* to_anchor = grad_anchor ? grad_anchor + first : unwanted;
    scalar* to_positive = grad_positive ? grad_positive + first : unwanted;
    scalar* to_negative = grad_negative ? grad_negative + first : unwanted;
#pragma GCC ivdep
    for (int64_t i = 0; i < size; ++i) {
      const T a = static_cast<T>(anchor[first + i]);
      const T p = static_cast<T>(positive[first + i]);
      const T n = static_cast<T>(negative[first + i]);
      const T u = scaled_phi<norm>(a - p + eps, d.positive, c.positive);
      const T v = scaled_phi<norm>(a - n + eps, d.negative, c.negative);
      const T w = swap ? scaled_phi<norm>(p - n + eps, d.swap, c.swap) : T(0);
      to_anchor[i] = static_cast<scalar>(u + v);
      to_positive[i] = static_cast<scalar>(w - u);
      to_negative[i] = static_cast<scalar>(-v - w);
    }
  }
}

template <typename scalar, Norm norm, typename T>
FUSED_OPS_CLONES void chunk_gradients(const scalar* anchor, const scalar* positive,
                                      const scalar* negative, int64_t count, T eps, bool swap,
                                      const TripletDistances<T>& d, const TripletCoefficients<T>& c,
                                      scalar* grad_anchor, scalar* grad_positive,
                                      scalar* grad_negative) {
  if (swap) {
    store_gradients<norm, true>(anchor, positive, negative, count, eps, d, c, grad_anchor,
                                grad_positive, grad_negative);
  } else {
    store_gradients<norm, false>(anchor, positive, negative, count, eps, d, c, grad_anchor,
                                 grad_positive, grad_negative);
  }
}

template <typename scalar, Norm norm>
void backward_items(const TripletBackward& params, int64_t begin, int64_t end) {
  using T = CpuAccumulate<scalar>;
  const TripletInputs& in = params.inputs;
  const int64_t chunks = triplet_chunks(in.dim);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / chunks;
    const int64_t offset = item % chunks * kTripletChunk;
    const int64_t count = std::min(kTripletChunk, in.dim - offset);
    const auto state = load_row_state<norm>(
        static_cast<const T*>(params.state) + row * state_columns(norm, in.swap), in.swap);
    const T unclamped = unclamped_loss(state.distances, static_cast<T>(params.margin), in.swap);
    scalar* gradients[3] = {static_cast<scalar*>(params.gradients.anchor),
                            static_cast<scalar*>(params.gradients.positive),
                            static_cast<scalar*>(params.gradients.negative)};
    for (scalar*& gradient : gradients) {
      if (gradient == nullptr) continue;
      gradient += row * in.dim + offset;
      if (is_inactive(unclamped)) std::memset(gradient, 0, count * sizeof(scalar));
    }
    if (is_inactive(unclamped)) continue;
    const RowPointers<scalar> at(in, row, offset);
    chunk_gradients<scalar, norm>(
        at.anchor, at.positive, at.negative, count, static_cast<T>(in.eps), in.swap,
        state.distances,
        coefficients<norm>(upstream_gradient<scalar, T>(params, row), state, unclamped, in),
        gradients[0], gradients[1], gradients[2]);
  }
}

}  // namespace

int64_t triplet_forward_scratch_bytes(const TripletForward& params) {
  return params.inputs.type == ScalarType::float64 ? Scratch<double>::bytes(params)
                                                   : Scratch<float>::bytes(params);
}

void triplet_forward_items(const TripletForward& params, void* scratch, int64_t begin,
                           int64_t end) {
  dispatch_on_cpu(params.inputs, [&](auto* pointer, auto norm) {
    forward_items<std::remove_pointer_t<decltype(pointer)>, norm.value>(params, scratch, begin,
                                                                        end);
  });
}

void triplet_forward_finish(const TripletForward& params, void* scratch) {
  dispatch_on_cpu(params.inputs, [&](auto* pointer, auto norm) {
    forward_finish<std::remove_pointer_t<decltype(pointer)>, norm.value>(params, scratch);
  });
}

void triplet_backward_items(const TripletBackward& params, int64_t begin, int64_t end) {
  dispatch_on_cpu(params.inputs, [&](auto* pointer, auto norm) {
    backward_items<std::remove_pointer_t<decltype(pointer)>, norm.value>(params, begin, end);
  });
}

}  // namespace fused_ops
