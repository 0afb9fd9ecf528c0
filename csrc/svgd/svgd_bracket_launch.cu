// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>

#include "common/allow_shared_memory.h"
#include "svgd/svgd_bracket_launch.cuh"
#include "svgd/svgd_bracket_launch.h"
#include "svgd/svgd_direct_count_kernel.cuh"
#include "svgd/svgd_dispatch.cuh"
#include "svgd/svgd_sample_kernel.cuh"
#include "svgd/svgd_select_kernel.cuh"
#include "svgd/svgd_tensor_count_kernel.cuh"

namespace fused_ops {
namespace {

cudaError_t launch_cooperative(void (*kernel)(BracketTask), BracketTask& task, int64_t blocks,
                               cudaStream_t stream) {
  void* arguments[] = {&task};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel),
                                     dim3(static_cast<unsigned>(blocks)), dim3(kTileThreads),
                                     arguments, 0, stream);
}

template <int dim>
cudaError_t launch_padded_count(const BracketTask& task, int splits, cudaStream_t stream) {
  using Shape = CountShape<dim>;
  static_assert(Shape::groups == count_groups(dim));
  constexpr auto kernel = svgd_tensor_count<dim>;
  const cudaError_t error = allow_shared_memory<kernel>();
  if (error != cudaSuccess) return error;
  const int64_t groups = ceil_div(task.split.padded_count / kSplitTile, Shape::groups);
  const int64_t own = ceil_div(groups - task.share.index, task.share.count);
  if (own <= 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(own), static_cast<unsigned>(splits));
  kernel<<<grid, Shape::threads, sizeof(CountRingShared<dim>), stream>>>(task);
  return cudaGetLastError();
}

cudaError_t launch_all(BracketMemory& memory, const SvgdPolicy& policy, const DeviceLimits& limits,
                       cudaStream_t stream) {
  BracketTask& task = memory.task;
  cudaError_t error = launch_bracket_sample(task, limits, stream);
  if (error == cudaSuccess && task.tensor_cores) error = launch_tensor_count(task, policy, stream);
  if (error == cudaSuccess) error = launch_direct_count(task, stream);
  if (error != cudaSuccess) return error;
  // A few keys to a thread.
  error =
      launch_cooperative(svgd_select, task, cooperative_blocks(task.capacity / 4, limits), stream);
  if (error != cudaSuccess) return error;
  // These passes return at once unless the bracket missed.
  return launch_svgd_median(memory.radix, policy, stream);
}

}  // namespace

BracketMemory make_bracket(const SvgdParticles& particles, BandwidthRule rule,
                           const SvgdPolicy& policy, const DeviceLimits& limits,
                           MemoryParts& parts) {
  const BracketPolicy& bracket = policy.bracket;
  BracketMemory memory{};
  BracketTask& task = memory.task;
  task.particles = particles;
  task.tensor_cores = bracket.tensor_cores;
  task.rule = rule;
  task.ranks = median_ranks(rule, particles.count);
  task.sample_size = bracket.sample_size;
  task.capacity = bracket.capacity;
  task.most_doubt = static_cast<float>(bracket.most_doubt);
  const int64_t edge = ceil_div(particles.count, kPairTile);
  task.direct_blocks = static_cast<int>(
      std::min<int64_t>(edge * (edge + 1) / 2, int64_t{2} * limits.multiprocessors));
  task.state = parts.take<BracketState>(1);
  task.sample = parts.take<unsigned>(bracket.sample_size);
  task.list = parts.take<unsigned>(bracket.capacity);
  if (bracket.tensor_cores) task.pairs = parts.take<int2>(bracket.capacity);
  task.partial_sums = parts.take<double>(task.direct_blocks);
  memory.radix = make_median_task(particles, rule, policy, parts);
  memory.radix.wanted = &task.state->missed;
  const double count = static_cast<double>(particles.count);
  const double share = static_cast<double>(task.ranks.lower) / (0.5 * count * (count - 1));
  for (int index = 0; index < kBracket; ++index) {
    const double at = share + bracket.offset + (index - 1) * bracket.half_width;
    task.sample_ranks[index] = static_cast<Count>(std::clamp<int64_t>(
        static_cast<int64_t>(at * static_cast<double>(task.sample_size)), 0, task.sample_size - 1));
  }
  return memory;
}

int64_t cooperative_blocks(int64_t work, const DeviceLimits& limits) {
  const int64_t resident = std::clamp(limits.shared_memory / (48 * 1024), 1, 4);
  return std::clamp<int64_t>(ceil_div(work, kTileThreads), 1, resident * limits.multiprocessors);
}

cudaError_t launch_bracket_sample(BracketTask& task, const DeviceLimits& limits,
                                  cudaStream_t stream) {
  return launch_cooperative(svgd_sample, task, cooperative_blocks(task.sample_size, limits),
                            stream);
}

cudaError_t launch_tensor_count(const BracketTask& task, const SvgdPolicy& policy,
                                cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  dispatch_padded_dim(task.split.padded_dim, [&](auto dim) {
    error = launch_padded_count<dim.value>(task, policy.bracket.splits, stream);
  });
  return error;
}

cudaError_t launch_direct_count(const BracketTask& task, cudaStream_t stream) {
  static_assert(sizeof(CountShared) <= direct_count_shared(1));
  static_assert(sizeof(CountShared) + sizeof(CountSums) <= direct_count_shared(kDimBlock + 1));
  constexpr auto kernel = svgd_direct_count;
  const cudaError_t error = allow_shared_memory<kernel>();
  if (error != cudaSuccess) return error;
  kernel<<<task.direct_blocks, kTileThreads, count_shared_bytes(task.particles.dim), stream>>>(
      task);
  return cudaGetLastError();
}

int64_t svgd_bracket_bytes(const SvgdParticles& particles, const SvgdPolicy& policy,
                           const DeviceLimits& limits) {
  MemoryParts parts(nullptr);
  make_bracket(particles, BandwidthRule::median, policy, limits, parts);
  return parts.bytes();
}

cudaError_t launch_svgd_bracket(const SvgdParticles& particles, const SplitParticles& split,
                                BandwidthRule rule, const SvgdPolicy& policy,
                                const DeviceLimits& limits, void* scratch, float* bandwidth,
                                cudaStream_t stream) {
  MemoryParts parts(scratch);
  BracketMemory memory = make_bracket(particles, rule, policy, limits, parts);
  memory.task.split = split;
  memory.task.bandwidth = bandwidth;
  memory.radix.bandwidth = bandwidth;
  return launch_all(memory, policy, limits, stream);
}

}  // namespace fused_ops
