// SPDX-License-Identifier: BSD-3-Clause
// Dynamic shared memory beyond the 48 KB that a kernel gets without asking.

#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace fused_ops {

// Lets `kernel` have all that a block may have on the current device. It asks once a device: asking
// takes a microsecond, and a launch not many.
template <auto kernel>
cudaError_t allow_shared_memory() {
  static std::atomic<uint64_t> devices{0};  // that were asked, a bit each
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((devices & bit) != 0) return cudaSuccess;
  int bytes = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncAttributes attributes{};
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes - static_cast<int>(attributes.sharedSizeBytes));
  }
  if (error == cudaSuccess) devices |= bit;
  return error;
}

}  // namespace fused_ops
