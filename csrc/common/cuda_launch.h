// SPDX-License-Identifier: BSD-3-Clause
// What surrounds every launch: the tensor's device, its current stream, and a check.

#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "common/cuda_stream.h"
#include "common/device_limits.h"

namespace fused_ops {

inline void check_cuda(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error));
}

// While it lives, the device of `tensor` is the current one.
struct CudaContext {
  explicit CudaContext(const torch::stable::Tensor& tensor)
      : device(tensor.get_device_index()),
        guard(device),
        stream(static_cast<cudaStream_t>(current_cuda_stream(device))) {}

  DeviceLimits limits() const {
    DeviceLimits limits{};
    check_cuda(
        cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device));
    check_cuda(cudaDeviceGetAttribute(&limits.shared_memory,
                                      cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    int major = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    check_cuda(
        cudaDeviceGetAttribute(&limits.capability, cudaDevAttrComputeCapabilityMinor, device));
    limits.capability += 10 * major;
    return limits;
  }

  int device;
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;
};

}  // namespace fused_ops
