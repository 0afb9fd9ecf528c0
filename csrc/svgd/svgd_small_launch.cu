// SPDX-License-Identifier: BSD-3-Clause
#include <type_traits>

#include "svgd/svgd_small_kernel.cuh"
#include "svgd/svgd_small_launch.h"

namespace fused_ops {
namespace {

constexpr int64_t kSmallMaxCount = 2048;
constexpr int64_t kSmallMaxDim = 4096;  // count * dim and its reduction are indexed in 32 bits

template <typename Function>
auto with_patch(int patch, Function&& function) {
  switch (patch) {
    case 1:
      return function(std::integral_constant<int, 1>{});
    case 2:
      return function(std::integral_constant<int, 2>{});
    case 4:
      return function(std::integral_constant<int, 4>{});
    default:
      return function(std::integral_constant<int, 8>{});
  }
}

int small_shared_bytes(int patch) {
  return with_patch(patch, [](auto value) { return static_cast<int>(sizeof(SmallShared<value>)); });
}

template <int size, SteinKernel kernel>
cudaError_t launch_kernel(const SmallTask& task, int blocks, cudaStream_t stream) {
  constexpr int bytes = sizeof(SmallShared<size>);
  auto* function = svgd_small<size, kernel>;
  const cudaError_t error =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  void* arguments[] = {const_cast<SmallTask*>(&task)};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(function), dim3(blocks),
                                     dim3(SmallShape<size>::threads), arguments, bytes, stream);
}

cudaError_t launch(SmallTask& task, const SvgdSmallPolicy& policy, void* scratch,
                   cudaStream_t stream) {
  task.bands = policy.bands;
  task.median = static_cast<SmallMedianScratch*>(scratch);
  task.partial_means = reinterpret_cast<double*>(task.median + 1);
  // An even number of doubles keeps the sums aligned to 16 bytes.
  task.partial = reinterpret_cast<float*>(task.partial_means + (policy.blocks() + 1) / 2 * 2);
  return with_patch(policy.patch, [&](auto patch) {
    if (task.update.kernel == SteinKernel::rbf) {
      return launch_kernel<patch.value, SteinKernel::rbf>(task, policy.blocks(), stream);
    }
    return launch_kernel<patch.value, SteinKernel::imq>(task, policy.blocks(), stream);
  });
}

}  // namespace

SvgdSmallPolicy svgd_small_policy(const SvgdParticles& particles, int multiprocessors,
                                  int shared_bytes, int patch) {
  if (particles.type != ScalarType::float32 || particles.count < 2 ||
      particles.count > kSmallMaxCount || particles.dim < 1 || particles.dim > kSmallMaxDim) {
    return {0, 0};
  }
  const int count = static_cast<int>(particles.count);
  for (int side = patch > 0 ? patch : 1; side <= 8; side *= 2) {
    const int edge = 16 * side;
    const SvgdSmallPolicy policy{side, (count + 2 * edge - 1) / (2 * edge) * 2};
    if (policy.bands <= kMaxBands && policy.blocks() <= multiprocessors &&
        small_shared_bytes(side) <= shared_bytes) {
      return policy;
    }
  }
  return {0, 0};
}

int64_t svgd_small_bytes(const SvgdParticles& particles, const SvgdSmallPolicy& policy) {
  return static_cast<int64_t>(sizeof(SmallMedianScratch)) +
         (policy.blocks() + 1) / 2 * 2 * static_cast<int64_t>(sizeof(double)) +
         policy.bands * particles.count * particles.dim * static_cast<int64_t>(sizeof(float));
}

cudaError_t launch_svgd_small(const SvgdUpdate& update, const BandwidthRule* rule,
                              const SvgdSmallPolicy& policy, void* scratch, void* bandwidth,
                              cudaStream_t stream) {
  SmallTask task{};
  task.update = update;
  task.apply = true;
  if (rule != nullptr) {
    task.select = true;
    task.rule = *rule;
    task.divisor = bandwidth_divisor(*rule, update.particles.count);
    task.ranks = median_ranks(*rule, update.particles.count);
    task.bandwidth = static_cast<float*>(bandwidth);
  }
  return launch(task, policy, scratch, stream);
}

cudaError_t launch_svgd_small_bandwidth(const SvgdParticles& particles, BandwidthRule rule,
                                        const SvgdSmallPolicy& policy, void* scratch,
                                        void* bandwidth, cudaStream_t stream) {
  SmallTask task{};
  task.update.particles = particles;
  task.select = true;
  task.rule = rule;
  task.divisor = bandwidth_divisor(rule, particles.count);
  task.ranks = median_ranks(rule, particles.count);
  task.bandwidth = static_cast<float*>(bandwidth);
  return launch(task, policy, scratch, stream);
}

}  // namespace fused_ops
