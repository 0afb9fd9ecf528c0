// SPDX-License-Identifier: BSD-3-Clause
#include <type_traits>

#include "common/launch_ticket.h"
#include "common/memory_parts.h"
#include "triplet/triplet_indexed_kernel.cuh"
#include "triplet/triplet_indexed_launch.h"

namespace fused_ops {
namespace {

// Whether every row starts and ends on a 16-byte boundary.
bool has_whole_rows(const TripletInputs& in) {
  const int size = element_size(in.type);
  return in.dim * size % kTripletAccessBytes == 0 &&
         (in.embeddings == 1 || in.anchor_stride * size % kTripletAccessBytes == 0) &&
         reinterpret_cast<uintptr_t>(in.anchor) % kTripletAccessBytes == 0;
}

// Calls `function` with a null pointer of the element type and, as types, the norm and whether rows
// are whole.
template <typename Function>
auto dispatch(const TripletInputs& in, Function&& function) {
  return dispatch_scalar(in.type, [&](auto* scalar) {
    return dispatch_norm(in.norm, [&](auto norm) {
      return has_whole_rows(in) ? function(scalar, norm, std::true_type{})
                                : function(scalar, norm, std::false_type{});
    });
  });
}

template <typename T>
IndexedParts<T> parts_of(MemoryParts& memory, int64_t dim, int64_t shares) {
  return {memory.take<T>(2 * shares * dim), memory.take<int64_t>(shares),
          memory.take<int64_t>(shares)};
}

}  // namespace

TripletIndexedPolicy triplet_indexed_policy(const TripletInputs& in, int multiprocessors,
                                            int64_t forced_share) {
  const int width = has_whole_rows(in) ? kTripletAccessBytes / element_size(in.type) : 1;
  return choose_triplet_indexed_policy(in.rows, in.dim, width, multiprocessors, forced_share);
}

int64_t triplet_indexed_forward_bytes(const TripletForward& params,
                                      const TripletIndexedPolicy& policy) {
  if (params.reduction == Reduction::none) return 0;
  return policy.row_blocks * static_cast<int64_t>(sizeof(Handover<Sum<double>>));
}

int64_t triplet_indexed_backward_bytes(const TripletInputs& in,
                                       const TripletIndexedPolicy& policy) {
  MemoryParts memory(nullptr);
  if (in.type == ScalarType::float64) {
    parts_of<double>(memory, in.dim, policy.shares);
  } else {
    parts_of<float>(memory, in.dim, policy.shares);
  }
  return memory.bytes();
}

cudaError_t launch_triplet_indexed_forward(const TripletForward& params,
                                           const TripletIndexedPolicy& policy, void* scratch,
                                           cudaStream_t stream) {
  return dispatch(params.inputs, [&](auto* pointer, auto norm, auto whole) {
    using scalar = std::remove_pointer_t<decltype(pointer)>;
    using T = typename AccumulateType<scalar>::type;
    TripletHandovers<norm.value, T> handovers{};
    handovers.sums = static_cast<Handover<Sum<double>>*>(scratch);
    handovers.ticket = next_launch_ticket();
    handovers.share = params.reduction == Reduction::mean ? 1.0 / params.inputs.rows : 1.0;
    const dim3 grid(1, static_cast<unsigned>(policy.row_blocks));
    triplet_indexed_forward<scalar, norm.value, whole.value>
        <<<grid, kIndexedBlock, 0, stream>>>(params, policy.forward_threads_per_row, handovers);
    return cudaGetLastError();
  });
}

cudaError_t launch_triplet_indexed_backward(const TripletIndexedBackward& params,
                                            const TripletIndexedPolicy& policy, void* scratch,
                                            cudaStream_t stream) {
  const TripletInputs& in = params.backward.inputs;
  return dispatch(in, [&](auto* pointer, auto norm, auto whole) {
    using scalar = std::remove_pointer_t<decltype(pointer)>;
    using T = typename AccumulateType<scalar>::type;
    MemoryParts memory(scratch);
    const IndexedParts<T> parts = parts_of<T>(memory, in.dim, policy.shares);
    const int64_t groups = kIndexedBlock / policy.backward_threads_per_row;
    const dim3 grid(static_cast<unsigned>(ceil_div(policy.shares, groups)),
                    static_cast<unsigned>(policy.column_tiles));
    cudaError_t error =
        cudaMemsetAsync(params.gradient, 0, in.embeddings * in.dim * sizeof(scalar), stream);
    if (error != cudaSuccess) return error;
    triplet_indexed_backward<scalar, norm.value, whole.value><<<grid, kIndexedBlock, 0, stream>>>(
        params, policy.backward_threads_per_row, policy.share, parts);
    if (error = cudaGetLastError(); error != cudaSuccess) return error;
    triplet_indexed_combine<scalar>
        <<<static_cast<unsigned>(policy.shares), kIndexedBlock, 0, stream>>>(
            static_cast<scalar*>(params.gradient), in.dim, policy.shares, parts);
    return cudaGetLastError();
  });
}

}  // namespace fused_ops
