// SPDX-License-Identifier: BSD-3-Clause
#include <type_traits>

#include "common/allow_shared_memory.h"
#include "common/launch_ticket.h"
#include "triplet/triplet_kernel.cuh"
#include "triplet/triplet_launch.h"
#include "triplet/triplet_tile_kernel.cuh"

namespace fused_ops {
namespace {

bool starts_on_boundary(const void* matrix) {
  return reinterpret_cast<uintptr_t>(matrix) % kTripletAccessBytes == 0;
}

// Whether every row starts and ends on a 16-byte boundary.
bool has_whole_rows(const TripletInputs& in) {
  const int size = element_size(in.type);
  bool whole = in.dim * size % 16 == 0;
  for (const void* matrix : {in.anchor, in.positive, in.negative}) {
    whole &= starts_on_boundary(matrix);
  }
  for (const int64_t stride : {in.anchor_stride, in.positive_stride, in.negative_stride}) {
    whole &= in.rows == 1 || stride * size % 16 == 0;
  }
  return whole;
}

// Whether rows lie one behind another from a 16-byte boundary on.
bool is_packed(const TripletInputs& in) {
  bool packed = true;
  for (const void* matrix : {in.anchor, in.positive, in.negative}) {
    packed &= starts_on_boundary(matrix);
  }
  for (const int64_t stride : {in.anchor_stride, in.positive_stride, in.negative_stride}) {
    packed &= in.rows == 1 || stride == in.dim;
  }
  return packed;
}

dim3 grid_of(const TripletPolicy& policy) {
  return dim3(static_cast<unsigned>(policy.segments), static_cast<unsigned>(policy.row_blocks));
}

// Calls `function` with a null pointer of the element type and, as a type, the norm.
template <typename Function>
auto dispatch(const TripletInputs& in, Function&& function) {
  return dispatch_scalar(in.type, [&](auto* scalar) {
    return dispatch_norm(in.norm, [&](auto norm) { return function(scalar, norm); });
  });
}

TripletTileWalk tile_walk(const TripletInputs& in, const TripletPolicy& policy) {
  const int width = kTripletAccessBytes / element_size(in.type);
  const int64_t capacity = triplet_tile_capacity(policy.tile_rows, in.dim, width);
  // Tiles of many rows keep to cache lines if whole; those of few do not anyway.
  const int unit = policy.tile_rows >= kWarpSize ? policy.tile_rows : 1;
  return {policy.tile_rows, static_cast<int>(capacity), unit, policy.threads_per_row};
}

template <auto kernel, typename... Arguments>
cudaError_t start(const TripletPolicy& policy, int shared_bytes, cudaStream_t stream,
                  const Arguments&... arguments) {
  if (shared_bytes > 0) {
    if (const cudaError_t error = allow_shared_memory<kernel>(); error != cudaSuccess) return error;
  }
  kernel<<<grid_of(policy), policy.threads_per_block, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace

TripletPolicy triplet_policy(const TripletInputs& in, const DeviceLimits& limits,
                             TripletForm form) {
  return choose_triplet_policy(in.rows, in.dim, kTripletAccessBytes / element_size(in.type),
                               has_whole_rows(in), is_packed(in), limits.multiprocessors,
                               limits.shared_memory, form);
}

int64_t triplet_forward_scratch_bytes(const TripletForward& params, const TripletPolicy& policy) {
  return dispatch(params.inputs, [&](auto* pointer, auto norm) -> int64_t {
    using T = typename AccumulateType<std::remove_pointer_t<decltype(pointer)>>::type;
    const int64_t segments = policy.segments > 1 ? params.inputs.rows * policy.segments : 0;
    const int64_t sums = params.reduction != Reduction::none ? policy.row_blocks : 0;
    return segments * sizeof(Handover<Distances<norm.value, T>>) +
           sums * sizeof(Handover<Sum<double>>);
  });
}

cudaError_t launch_triplet_forward(const TripletForward& params, const TripletPolicy& policy,
                                   const TripletGradients& gradients, int guess, void* scratch,
                                   cudaStream_t stream) {
  return dispatch(params.inputs, [&](auto* pointer, auto norm_constant) {
    using scalar = std::remove_pointer_t<decltype(pointer)>;
    using T = typename AccumulateType<scalar>::type;
    constexpr Norm norm = norm_constant.value;
    TripletHandovers<norm, T> handovers{};
    handovers.segments = static_cast<Handover<Distances<norm, T>>*>(scratch);
    const int64_t segments = policy.segments > 1 ? params.inputs.rows * policy.segments : 0;
    handovers.sums = reinterpret_cast<Handover<Sum<double>>*>(handovers.segments + segments);
    handovers.ticket = next_launch_ticket();
    handovers.share = params.reduction == Reduction::mean ? 1.0 / params.inputs.rows : 1.0;
    const int shared_bytes = policy.shared_bytes;
    if (policy.tile_rows > 0) {
      constexpr auto kernel = triplet_tile_forward<scalar, norm>;
      return start<kernel>(policy, shared_bytes, stream, params, gradients, guess,
                           tile_walk(params.inputs, policy), handovers);
    }
    const auto launch = [&](auto whole) {
      if (policy.holds_rows && guess != 0) {
        constexpr auto kernel = triplet_forward_with_gradients<scalar, norm, whole.value>;
        const TripletWalk walk{policy.threads_per_row, policy.accesses, policy.stages};
        return start<kernel>(policy, shared_bytes, stream, params, gradients, guess, walk,
                             handovers);
      }
      const auto launch_plain = [&](auto with_swap) {
        constexpr auto kernel = triplet_forward<scalar, norm, whole.value, with_swap.value>;
        return start<kernel>(policy, 0, stream, params, policy.threads_per_row, policy.segment_size,
                             handovers);
      };
      return params.inputs.swap ? launch_plain(std::true_type{}) : launch_plain(std::false_type{});
    };
    return has_whole_rows(params.inputs) ? launch(std::true_type{}) : launch(std::false_type{});
  });
}

cudaError_t launch_triplet_backward(const TripletBackward& params, const TripletPolicy& policy,
                                    const TripletStateHeader* header, cudaStream_t stream) {
  // Gradients that start off the boundaries are not stored as tiles are.
  bool tiles = policy.tile_rows > 0;
  for (const void* gradient :
       {params.gradients.anchor, params.gradients.positive, params.gradients.negative}) {
    tiles &= starts_on_boundary(gradient);
  }
  return dispatch(params.inputs, [&](auto* pointer, auto norm_constant) {
    using scalar = std::remove_pointer_t<decltype(pointer)>;
    constexpr Norm norm = norm_constant.value;
    if (tiles) {
      constexpr auto kernel = triplet_tile_backward<scalar, norm>;
      return start<kernel>(policy, policy.shared_bytes, stream, params, header,
                           tile_walk(params.inputs, policy));
    }
    const auto launch = [&](auto whole) {
      constexpr auto kernel = triplet_backward<scalar, norm, whole.value>;
      return start<kernel>(policy, 0, stream, params, header, policy.threads_per_row,
                           policy.segment_size);
    };
    return has_whole_rows(params.inputs) ? launch(std::true_type{}) : launch(std::false_type{});
  });
}

}  // namespace fused_ops
