// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <type_traits>

#include "common/device/vector.cuh"
#include "svgd/svgd_cast.h"

namespace fused_ops {
namespace {

constexpr int kCastThreads = 256;

template <typename scalar>
__global__ void __launch_bounds__(kCastThreads)
    svgd_widen(const scalar* matrix, int64_t size, int64_t dim, int64_t stride, float* wide) {
  const int64_t step = int64_t{gridDim.x} * kCastThreads;
  for (int64_t i = int64_t{blockIdx.x} * kCastThreads + threadIdx.x; i < size; i += step) {
    wide[i] = to_accumulate(matrix[i / dim * stride + i % dim]);
  }
}

template <typename scalar>
__global__ void __launch_bounds__(kCastThreads)
    svgd_narrow(const float* wide, int64_t size, scalar* result) {
  const int64_t step = int64_t{gridDim.x} * kCastThreads;
  for (int64_t i = int64_t{blockIdx.x} * kCastThreads + threadIdx.x; i < size; i += step) {
    result[i] = from_accumulate<scalar>(wide[i]);
  }
}

unsigned cast_blocks(int64_t size) {
  constexpr int64_t most = 4096;
  return static_cast<unsigned>(std::min((size + kCastThreads - 1) / kCastThreads, most));
}

// Calls `launch` with a null pointer of the CUDA type of 16 bits.
template <typename Launch>
cudaError_t dispatch_narrow(ScalarType type, Launch launch) {
  return dispatch_scalar(type, [&](auto* pointer) {
    if constexpr (sizeof(*pointer) != 2) {
      return cudaErrorInvalidValue;
    } else {
      launch(pointer);
      return cudaGetLastError();
    }
  });
}

}  // namespace

cudaError_t launch_svgd_widen(ScalarType type, const void* matrix, int64_t count, int64_t dim,
                              int64_t stride, float* wide, cudaStream_t stream) {
  return dispatch_narrow(type, [&](auto* pointer) {
    using scalar = std::remove_pointer_t<decltype(pointer)>;
    svgd_widen<<<cast_blocks(count * dim), kCastThreads, 0, stream>>>(
        static_cast<const scalar*>(matrix), count * dim, dim, stride, wide);
  });
}

cudaError_t launch_svgd_narrow(ScalarType type, const float* wide, int64_t size, void* result,
                               cudaStream_t stream) {
  return dispatch_narrow(type, [&](auto* pointer) {
    using scalar = std::remove_pointer_t<decltype(pointer)>;
    svgd_narrow<<<cast_blocks(size), kCastThreads, 0, stream>>>(wide, size,
                                                                static_cast<scalar*>(result));
  });
}

}  // namespace fused_ops
