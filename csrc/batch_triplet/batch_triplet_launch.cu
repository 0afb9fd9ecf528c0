// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <type_traits>

#include "batch_triplet/batch_triplet_kernel.cuh"
#include "batch_triplet/batch_triplet_launch.h"
#include "common/ceil_div.h"

namespace fused_ops {
namespace {

constexpr int kRowThreads = kRowsPerBlock * kWarpSize;

unsigned blocks_of(int64_t count, int64_t per_block) {
  return static_cast<unsigned>(ceil_div(count, per_block));
}

template <typename Function>
auto dispatch_accumulate(ScalarType type, const Function& function) {
  return type == ScalarType::float64 ? function(static_cast<double*>(nullptr))
                                     : function(static_cast<float*>(nullptr));
}

template <typename Function>
auto dispatch_mining(Mining mining, const Function& function) {
  switch (mining) {
    case Mining::all:
      return function(std::integral_constant<Mining, Mining::all>{});
    case Mining::semihard:
      return function(std::integral_constant<Mining, Mining::semihard>{});
    default:
      return function(std::integral_constant<Mining, Mining::hard>{});
  }
}

}  // namespace

cudaError_t launch_batch_prepare(const BatchTriplet& call, void* centre, cudaStream_t stream) {
  return dispatch_scalar(call.type, [&](auto* null) {
    using scalar = std::remove_reference_t<decltype(*null)>;
    auto* const mean = static_cast<Accumulated<scalar>*>(centre);
    const BatchRows& y = call.references;
    batch_centre_kernel<scalar>
        <<<blocks_of(call.dim, kWarpSize), dim3(kWarpSize, kWarpSize), 0, stream>>>(
            static_cast<const scalar*>(y.data), y.count, y.stride, call.dim, mean);
    const auto prepare = [&](const BatchRows& rows) {
      batch_prepare_kernel<scalar>
          <<<blocks_of(rows.count, kRowsPerBlock), kRowThreads, 0, stream>>>(rows, call.dim, mean);
    };
    prepare(call.anchors);
    if (!call.shares_rows()) prepare(y);
    return cudaGetLastError();
  });
}

cudaError_t launch_batch_mine(const BatchTriplet& call, const BatchChunk& chunk,
                              cudaStream_t stream) {
  return dispatch_scalar(call.type, [&](auto* null) {
    using scalar = std::remove_reference_t<decltype(*null)>;
    return dispatch_mining(call.mining, [&](auto mining) {
      batch_mine_kernel<scalar, mining>
          <<<blocks_of(chunk.count, 1), kMineThreads, 0, stream>>>(call, chunk);
      return cudaGetLastError();
    });
  });
}

cudaError_t launch_batch_symmetrise(const BatchTriplet& call, void* coefficients,
                                    cudaStream_t stream) {
  return dispatch_accumulate(call.type, [&](auto* null) {
    using T = std::remove_reference_t<decltype(*null)>;
    const unsigned tiles = blocks_of(call.anchors.count, kWarpSize);
    batch_symmetrise_kernel<T><<<dim3(tiles, tiles), dim3(kWarpSize, kTileRows), 0, stream>>>(
        static_cast<T*>(coefficients), call.anchors.count);
    return cudaGetLastError();
  });
}

cudaError_t launch_batch_add(const BatchTriplet& call, void* into, const void* values,
                             int64_t count, cudaStream_t stream) {
  return dispatch_accumulate(call.type, [&](auto* null) {
    using T = std::remove_reference_t<decltype(*null)>;
    const unsigned blocks = blocks_of(std::min<int64_t>(count, 1 << 20), kRowThreads);
    batch_add_kernel<T><<<blocks, kRowThreads, 0, stream>>>(static_cast<T*>(into),
                                                            static_cast<const T*>(values), count);
    return cudaGetLastError();
  });
}

cudaError_t launch_batch_reduce(const BatchTriplet& call, const BatchTotals* anchors,
                                BatchReduction reduction, void* loss, double* totals, double* scale,
                                cudaStream_t stream) {
  return dispatch_accumulate(call.type, [&](auto* null) {
    using T = std::remove_reference_t<decltype(*null)>;
    batch_reduce_kernel<T><<<1, kReduceThreads, 0, stream>>>(
        anchors, call.anchors.count, reduction, static_cast<T*>(loss),
        reinterpret_cast<BatchTotals*>(totals), scale);
    return cudaGetLastError();
  });
}

cudaError_t launch_batch_gradient(const BatchTriplet& call, const BatchGradient& gradient,
                                  cudaStream_t stream) {
  return dispatch_accumulate(call.type, [&](auto* null) {
    using T = std::remove_reference_t<decltype(*null)>;
    const BatchRows& rows = *gradient.rows;
    batch_gradient_kernel<T><<<blocks_of(rows.count, kRowsPerBlock), kRowThreads, 0, stream>>>(
        rows, static_cast<const T*>(gradient.sums), static_cast<const T*>(gradient.more_sums),
        gradient.scale, call.dim, static_cast<T*>(gradient.gradient));
    return cudaGetLastError();
  });
}

cudaError_t launch_batch_hard_gradient(const BatchTriplet& call, const HardGradient& gradient,
                                       cudaStream_t stream) {
  return dispatch_scalar(call.type, [&](auto* null) {
    using scalar = std::remove_reference_t<decltype(*null)>;
    using T = Accumulated<scalar>;
    const int64_t count = gradient.rows->count;
    batch_hard_gradient_kernel<scalar><<<blocks_of(count, kRowsPerBlock), kRowThreads, 0, stream>>>(
        call.anchors, call.references, call.dim, gradient.as_anchors, gradient.as_references, count,
        static_cast<const HardPicks<T>*>(gradient.picks), gradient.scale,
        static_cast<T*>(gradient.gradient));
    return cudaGetLastError();
  });
}

}  // namespace fused_ops
