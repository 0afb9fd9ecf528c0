// SPDX-License-Identifier: BSD-3-Clause
#include <type_traits>

#include "common/allow_shared_memory.h"
#include "svgd/svgd_batch_kernel.cuh"
#include "svgd/svgd_batch_launch.h"
#include "svgd/svgd_dispatch.cuh"

namespace fused_ops {
namespace {

constexpr int64_t kBatchMaxCount = 256;  // particles of a problem
constexpr int64_t kOtherShared = 1024;   // what the kernel has besides, rounded up

int64_t batch_bytes(const SvgdParticles& particles) {
  return batch_elements(particles.count, particles.dim) * accumulate_size(particles.type);
}

template <typename T, SteinKernel kernel_name>
cudaError_t launch(const BatchTask& task, int64_t problems, cudaStream_t stream) {
  constexpr auto kernel = svgd_batch<T, kernel_name>;
  const cudaError_t error = allow_shared_memory<kernel>();
  if (error != cudaSuccess) return error;
  const auto bytes = static_cast<size_t>(batch_bytes(task.first.particles));
  kernel<<<static_cast<unsigned>(problems), kTileThreads, bytes, stream>>>(task);
  return cudaGetLastError();
}

}  // namespace

bool svgd_batch_takes(const SvgdParticles& particles, int shared_bytes) {
  return particles.count <= kBatchMaxCount && batch_bytes(particles) + kOtherShared <= shared_bytes;
}

cudaError_t launch_svgd_batch(const SvgdUpdate& first, int64_t problems, const BandwidthRule* rule,
                              void* bandwidths, cudaStream_t stream) {
  static_assert(sizeof(BatchShared<double>) <= kOtherShared);
  BatchTask task{};
  task.first = first;
  task.apply = first.result != nullptr;
  task.bandwidths = bandwidths;
  if (rule != nullptr) {
    task.select = true;
    task.rule = *rule;
    task.divisor = bandwidth_divisor(*rule, first.particles.count);
    task.ranks = median_ranks(*rule, first.particles.count);
  }
  return dispatch_wide(first.particles.type, [&](auto* pointer) {
    using T = std::remove_pointer_t<decltype(pointer)>;
    return first.kernel == SteinKernel::rbf ? launch<T, SteinKernel::rbf>(task, problems, stream)
                                            : launch<T, SteinKernel::imq>(task, problems, stream);
  });
}

}  // namespace fused_ops
