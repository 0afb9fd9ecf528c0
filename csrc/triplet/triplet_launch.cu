// SPDX-License-Identifier: BSD-3-Clause
#include <type_traits>

#include "triplet/triplet_kernel.cuh"
#include "triplet/triplet_launch.h"

namespace fused_ops {
namespace {

// Whether every row starts on a 16-byte boundary. A null matrix always does.
bool aligned(const void* matrix, int64_t rows, int64_t stride, ScalarType type) {
  return matrix == nullptr || (reinterpret_cast<uintptr_t>(matrix) % 16 == 0 &&
                               (rows == 1 || stride * element_size(type) % 16 == 0));
}

bool aligned(const TripletInputs& in) {
  return aligned(in.anchor, in.rows, in.anchor_stride, in.type) &&
         aligned(in.positive, in.rows, in.positive_stride, in.type) &&
         aligned(in.negative, in.rows, in.negative_stride, in.type);
}

bool aligned(const TripletBackward& params) {
  const TripletInputs& in = params.inputs;
  return aligned(in) && aligned(params.grad_anchor, in.rows, in.dim, in.type) &&
         aligned(params.grad_positive, in.rows, in.dim, in.type) &&
         aligned(params.grad_negative, in.rows, in.dim, in.type);
}

dim3 grid_of(const TripletPolicy& policy) {
  return dim3(static_cast<unsigned>(policy.segments), static_cast<unsigned>(policy.row_blocks));
}

// Calls `function` with a null pointer of the element type and, as a type, the norm.
template <typename Function>
auto dispatch(const TripletInputs& in, Function&& function) {
  return dispatch_scalar(in.type, [&](auto* scalar) {
    switch (in.norm) {
      case Norm::one:
        return function(scalar, std::integral_constant<Norm, Norm::one>{});
      case Norm::two:
        return function(scalar, std::integral_constant<Norm, Norm::two>{});
      default:
        return function(scalar, std::integral_constant<Norm, Norm::infinity>{});
    }
  });
}

TripletPolicy choose(const TripletInputs& in, bool vectorised, bool reduces, int multiprocessors,
                     TripletForm form) {
  const int size = element_size(in.type);
  return choose_triplet_policy(in.rows, in.dim, size, vectorised ? 16 / size : 1, reduces,
                               multiprocessors, form);
}

}  // namespace

TripletPolicy triplet_policy(const TripletForward& params, int multiprocessors, TripletForm form) {
  return choose(params.inputs, aligned(params.inputs), params.reduction != Reduction::none,
                multiprocessors, form);
}

TripletPolicy triplet_policy(const TripletBackward& params, int multiprocessors, TripletForm form) {
  return choose(params.inputs, aligned(params), false, multiprocessors, form);
}

// Scratch holds the partial distances of segments or else the partial sums of blocks.
int64_t triplet_forward_scratch_bytes(const TripletForward& params, const TripletPolicy& policy) {
  return dispatch(params.inputs, [&](auto* pointer, auto norm) -> int64_t {
    using T = typename AccumulateType<std::remove_pointer_t<decltype(pointer)>>::type;
    if (policy.segments > 1) {
      return params.inputs.rows * policy.segments * sizeof(Distances<norm.value, T>);
    }
    const bool sums = params.reduction != Reduction::none && policy.row_blocks > 1;
    return sums ? policy.row_blocks * sizeof(T) : 0;
  });
}

cudaError_t launch_triplet_forward(const TripletForward& params, const TripletPolicy& policy,
                                   void* scratch, cudaStream_t stream) {
  return dispatch(params.inputs, [&](auto* pointer, auto norm_constant) {
    using scalar = std::remove_pointer_t<decltype(pointer)>;
    using T = typename AccumulateType<scalar>::type;
    constexpr Norm norm = norm_constant.value;
    T* partial_sums = static_cast<T*>(scratch);
    auto* segments = static_cast<Distances<norm, T>*>(scratch);
    const auto kernel = aligned(params.inputs) ? triplet_forward<scalar, norm, true>
                                               : triplet_forward<scalar, norm, false>;
    kernel<<<grid_of(policy), policy.threads_per_block, 0, stream>>>(
        params, policy.threads_per_row, policy.segment_size, partial_sums, segments);
    if (policy.segments > 1) {
      triplet_forward_finish<scalar, norm>
          <<<1, kFinishThreads, 0, stream>>>(params, policy.segments, segments);
    } else if (policy.row_blocks > 1 && params.reduction != Reduction::none) {
      triplet_loss_sum<scalar>
          <<<1, kFinishThreads, 0, stream>>>(params, policy.row_blocks, partial_sums);
    }
    return cudaGetLastError();
  });
}

cudaError_t launch_triplet_backward(const TripletBackward& params, const TripletPolicy& policy,
                                    cudaStream_t stream) {
  return dispatch(params.inputs, [&](auto* pointer, auto norm_constant) {
    using scalar = std::remove_pointer_t<decltype(pointer)>;
    constexpr Norm norm = norm_constant.value;
    const auto kernel = aligned(params) ? triplet_backward<scalar, norm, true>
                                        : triplet_backward<scalar, norm, false>;
    kernel<<<grid_of(policy), policy.threads_per_block, 0, stream>>>(params, policy.threads_per_row,
                                                                     policy.segment_size);
    return cudaGetLastError();
  });
}

}  // namespace fused_ops
