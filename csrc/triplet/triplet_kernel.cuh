// SPDX-License-Identifier: BSD-3-Clause
// CUDA kernels of triplet_margin_loss.
//
// Both directions are bound by memory: the forward reads each input once, the backward reads the
// rows that are not inactive once and writes each gradient once. A group of threads takes a row;
// blocks stride over the rows (gridDim.y) and, where a row is shared, over its segments
// (gridDim.x). Reductions run in a fixed order and there are no atomics, so results repeat bit for
// bit.
//
// triplet_forward         distances, loss and state of whole rows, or partial distances of segments
// triplet_forward_finish  loss and state of rows whose segments were read apart
// triplet_loss_sum        the reduced loss from one partial sum a block
// triplet_backward        the gradients

#pragma once

#include "common/device/reduce.cuh"
#include "common/device/vector.cuh"
#include "triplet/triplet.h"
#include "triplet/triplet_formula.h"

namespace fused_ops {

constexpr int kMaxTripletWarps = 32;  // of the largest block
constexpr int kFinishThreads = 1024;  // of the one block that finishes or adds what others left

// |x|_p while elements come in; for p = inf also how many attain the maximum.
template <Norm norm, typename T>
struct Distance {
  T value{};

  __device__ void add(T x) {
    if constexpr (norm == Norm::two) value += x * x;
    if constexpr (norm == Norm::one) value += x < T(0) ? -x : x;
  }
  __device__ void merge(const Distance& other) { value += other.value; }
  __device__ T result() const { return norm == Norm::two ? sqrt(value) : value; }
};

template <typename T>
struct Distance<Norm::infinity, T> {
  T value{};
  long long ties = 0;

  __device__ void add(T x) { merge({x < T(0) ? -x : x, 1}); }
  __device__ void merge(const Distance& other) {
    if (value == other.value) {
      ties += other.ties;
    } else if (!(other.value < value) && value == value) {  // NaN wins
      *this = other;
    }
  }
  __device__ T result() const { return value; }
};

template <Norm norm, typename T>
struct Distances {
  Distance<norm, T> positive;
  Distance<norm, T> negative;
  Distance<norm, T> swap;

  __device__ void add(T anchor, T positive_element, T negative_element, T eps, bool with_swap) {
    positive.add(anchor - positive_element + eps);
    negative.add(anchor - negative_element + eps);
    if (with_swap) swap.add(positive_element - negative_element + eps);
  }
  __device__ void merge(const Distances& other) {
    positive.merge(other.positive);
    negative.merge(other.negative);
    swap.merge(other.swap);
  }
};

template <Norm norm, typename T>
__device__ inline Distance<norm, T> shuffle_down(Distance<norm, T> distance, int offset,
                                                 int width) {
  distance.value = __shfl_down_sync(0xffffffffu, distance.value, offset, width);
  if constexpr (norm == Norm::infinity) {
    distance.ties = __shfl_down_sync(0xffffffffu, distance.ties, offset, width);
  }
  return distance;
}

template <Norm norm, typename T>
__device__ inline Distances<norm, T> shuffle_down(const Distances<norm, T>& d, int offset,
                                                  int width) {
  return {shuffle_down(d.positive, offset, width), shuffle_down(d.negative, offset, width),
          shuffle_down(d.swap, offset, width)};
}

// The elements [begin, end) of a row that this thread, one of `stride`, reads.
template <typename scalar, Norm norm, bool vectorised>
__device__ inline auto partial_distances(const TripletInputs& in, int64_t row, int64_t begin,
                                         int64_t end, int thread, int stride) {
  using T = typename AccumulateType<scalar>::type;
  constexpr int width = kWidth<scalar, vectorised>;
  const scalar* anchor = static_cast<const scalar*>(in.anchor) + row * in.anchor_stride;
  const scalar* positive = static_cast<const scalar*>(in.positive) + row * in.positive_stride;
  const scalar* negative = static_cast<const scalar*>(in.negative) + row * in.negative_stride;
  const T eps = static_cast<T>(in.eps);
  Distances<norm, T> distances;
  const int64_t whole = begin + (end - begin) / width * width;
#pragma unroll 4
  for (int64_t d = begin + thread * width; d < whole; d += stride * width) {
    const auto a = load<width>(anchor + d);
    const auto p = load<width>(positive + d);
    const auto n = load<width>(negative + d);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      distances.add(to_accumulate(a.value[i]), to_accumulate(p.value[i]), to_accumulate(n.value[i]),
                    eps, in.swap);
    }
  }
  for (int64_t d = whole + thread; d < end; d += stride) {
    distances.add(to_accumulate(anchor[d]), to_accumulate(positive[d]), to_accumulate(negative[d]),
                  eps, in.swap);
  }
  return distances;
}

template <typename scalar, typename T>
__device__ inline void store_loss(const TripletForward& params, int64_t index, T loss) {
  if (params.accumulate_loss) {
    static_cast<T*>(params.loss)[index] = loss;
  } else {
    static_cast<scalar*>(params.loss)[index] = from_accumulate<scalar>(loss);
  }
}

template <typename scalar, typename T>
__device__ inline void store_reduced_loss(const TripletForward& params, T sum) {
  const T rows = static_cast<T>(params.inputs.rows);
  store_loss<scalar>(params, 0, params.reduction == Reduction::mean ? sum / rows : sum);
}

// Stores what a row leaves behind and returns its loss.
template <typename scalar, Norm norm, typename T>
__device__ inline T finish_row(const TripletForward& params, int64_t row,
                               const Distances<norm, T>& d) {
  const TripletDistances<T> distances{d.positive.result(), d.negative.result(), d.swap.result()};
  const T unclamped = unclamped_loss(distances, static_cast<T>(params.margin), params.inputs.swap);
  if (params.state != nullptr) {
    T* state = static_cast<T*>(params.state) + row * state_columns(norm);
    state[0] = unclamped;
    state[1] = distances.positive;
    state[2] = distances.negative;
    state[3] = distances.swap;
    if constexpr (norm == Norm::infinity) {
      state[4] = static_cast<T>(d.positive.ties);
      state[5] = static_cast<T>(d.negative.ties);
      state[6] = static_cast<T>(d.swap.ties);
    }
  }
  const T loss = clamped_loss(unclamped);
  if (params.reduction == Reduction::none) store_loss<scalar>(params, row, loss);
  return loss;
}

// Adds the losses of a block's rows; a lone block writes the result, others a partial sum.
template <typename scalar, typename T>
__device__ inline void finish_block(const TripletForward& params, T loss, T* partial_sums) {
  if (params.reduction == Reduction::none) return;
  __shared__ Sum<T> shared[kMaxTripletWarps];
  const Sum<T> sum = reduce_group(Sum<T>{loss}, blockDim.x, shared);
  if (threadIdx.x != 0) return;
  if (gridDim.y == 1) {
    store_reduced_loss<scalar>(params, sum.value);
  } else {
    partial_sums[blockIdx.y] = sum.value;
  }
}

// `partial_sums` has gridDim.y elements; `segments` is (rows, gridDim.x), or unused where
// gridDim.x is 1.
template <typename scalar, Norm norm, bool vectorised>
__global__ void __launch_bounds__(1024)
    triplet_forward(const __grid_constant__ TripletForward params, int threads_per_row,
                    int64_t segment_size, typename AccumulateType<scalar>::type* partial_sums,
                    Distances<norm, typename AccumulateType<scalar>::type>* segments) {
  using T = typename AccumulateType<scalar>::type;
  __shared__ Distances<norm, T> shared[kMaxTripletWarps];
  const TripletInputs& in = params.inputs;
  const int thread = threadIdx.x % threads_per_row;
  const int group = threadIdx.x / threads_per_row;
  const int groups = blockDim.x / threads_per_row;
  const int64_t begin = blockIdx.x * segment_size;
  const int64_t end = begin + segment_size < in.dim ? begin + segment_size : in.dim;
  T loss = 0;
  // The bound is the block's, not the group's: every thread takes part in a reduction.
  for (int64_t first = int64_t{blockIdx.y} * groups; first < in.rows;
       first += int64_t{gridDim.y} * groups) {
    const int64_t row = first + group;
    Distances<norm, T> distances;
    if (row < in.rows) {
      distances =
          partial_distances<scalar, norm, vectorised>(in, row, begin, end, thread, threads_per_row);
    }
    distances = reduce_group(distances, threads_per_row, shared);
    if (thread != 0 || row >= in.rows) continue;
    if (gridDim.x > 1) {
      segments[row * gridDim.x + blockIdx.x] = distances;
    } else {
      loss += finish_row<scalar>(params, row, distances);
    }
  }
  if (gridDim.x == 1) finish_block<scalar>(params, loss, partial_sums);
}

// One block, a row to a warp: only few rows are split. `segments` is (rows, segment_count).
template <typename scalar, Norm norm>
__global__ void __launch_bounds__(1024)
    triplet_forward_finish(const __grid_constant__ TripletForward params, int64_t segment_count,
                           const Distances<norm, typename AccumulateType<scalar>::type>* segments) {
  using T = typename AccumulateType<scalar>::type;
  const int thread = threadIdx.x % kWarpSize;
  T loss = 0;
  for (int64_t row = threadIdx.x / kWarpSize; row < params.inputs.rows; row += kMaxTripletWarps) {
    Distances<norm, T> distances;
    for (int64_t i = thread; i < segment_count; i += kWarpSize) {
      distances.merge(segments[row * segment_count + i]);
    }
    distances = reduce_group<Distances<norm, T>>(distances, kWarpSize, nullptr);
    if (thread == 0) loss += finish_row<scalar>(params, row, distances);
  }
  finish_block<scalar>(params, loss, static_cast<T*>(nullptr));
}

// One block adds `count` partial sums, in float64 since there are few.
template <typename scalar>
__global__ void __launch_bounds__(kFinishThreads)
    triplet_loss_sum(const __grid_constant__ TripletForward params, int64_t count,
                     const typename AccumulateType<scalar>::type* partial_sums) {
  using T = typename AccumulateType<scalar>::type;
  __shared__ Sum<double> shared[kMaxTripletWarps];
  Sum<double> sum;
  for (int64_t i = threadIdx.x; i < count; i += kFinishThreads) sum.value += partial_sums[i];
  sum = reduce_group(sum, kFinishThreads, shared);
  if (threadIdx.x == 0) store_reduced_loss<scalar>(params, static_cast<T>(sum.value));
}

template <typename scalar, typename T>
__device__ inline T upstream_gradient(const TripletBackward& params, int64_t row) {
  const int64_t index = row * params.grad_loss_stride;
  const T gradient =
      params.accumulate_loss
          ? static_cast<const T*>(params.grad_loss)[index]
          : static_cast<T>(to_accumulate(static_cast<const scalar*>(params.grad_loss)[index]));
  return params.reduction == Reduction::mean ? gradient / static_cast<T>(params.inputs.rows)
                                             : gradient;
}

// The gradients of `width` elements from `offset` of each input; `destination` is where they go in
// the contiguous gradients. Rows that are inactive are not read.
template <typename scalar, Norm norm, int width, typename T>
__device__ inline void store_gradients(const TripletBackward& params, int64_t row, int64_t d,
                                       bool inactive, const T* state,
                                       const TripletCoefficients<T>& c) {
  const TripletInputs& in = params.inputs;
  Vector<scalar, width> grad_anchor{}, grad_positive{}, grad_negative{};
  if (!inactive) {
    const T eps = static_cast<T>(in.eps);
    const auto a = load<width>(static_cast<const scalar*>(in.anchor) + row * in.anchor_stride + d);
    const auto p =
        load<width>(static_cast<const scalar*>(in.positive) + row * in.positive_stride + d);
    const auto n =
        load<width>(static_cast<const scalar*>(in.negative) + row * in.negative_stride + d);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const T anchor = to_accumulate(a.value[i]);
      const T positive = to_accumulate(p.value[i]);
      const T negative = to_accumulate(n.value[i]);
      const T u = scaled_phi<norm>(anchor - positive + eps, state[1], c.positive);
      const T v = scaled_phi<norm>(anchor - negative + eps, state[2], c.negative);
      const T w = in.swap ? scaled_phi<norm>(positive - negative + eps, state[3], c.swap) : T(0);
      grad_anchor.value[i] = from_accumulate<scalar>(u + v);
      grad_positive.value[i] = from_accumulate<scalar>(w - u);
      grad_negative.value[i] = from_accumulate<scalar>(-v - w);
    }
  }
  const int64_t destination = row * in.dim + d;
  if (params.grad_anchor)
    store(static_cast<scalar*>(params.grad_anchor) + destination, grad_anchor);
  if (params.grad_positive) {
    store(static_cast<scalar*>(params.grad_positive) + destination, grad_positive);
  }
  if (params.grad_negative) {
    store(static_cast<scalar*>(params.grad_negative) + destination, grad_negative);
  }
}

template <typename scalar, Norm norm, bool vectorised>
__global__ void __launch_bounds__(1024)
    triplet_backward(const __grid_constant__ TripletBackward params, int threads_per_row,
                     int64_t segment_size) {
  using T = typename AccumulateType<scalar>::type;
  constexpr int width = kWidth<scalar, vectorised>;
  const TripletInputs& in = params.inputs;
  const int thread = threadIdx.x % threads_per_row;
  const int groups = blockDim.x / threads_per_row;
  const int64_t begin = blockIdx.x * segment_size;
  const int64_t end = begin + segment_size < in.dim ? begin + segment_size : in.dim;
  const int64_t whole = begin + (end - begin) / width * width;
  for (int64_t row = int64_t{blockIdx.y} * groups + threadIdx.x / threads_per_row; row < in.rows;
       row += int64_t{gridDim.y} * groups) {
    const T* state = static_cast<const T*>(params.state) + row * state_columns(norm);
    const bool inactive = is_inactive(state[0]);
    const auto c = coefficients<norm>(upstream_gradient<scalar, T>(params, row), state, in.swap);
    for (int64_t d = begin + thread * width; d < whole; d += threads_per_row * width) {
      store_gradients<scalar, norm, width>(params, row, d, inactive, state, c);
    }
    for (int64_t d = whole + thread; d < end; d += threads_per_row) {
      store_gradients<scalar, norm, 1>(params, row, d, inactive, state, c);
    }
  }
}

}  // namespace fused_ops
