// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <type_traits>

#include "common/allow_shared_memory.h"
#include "common/memory_parts.h"
#include "svgd/svgd_bracket_launch.h"
#include "svgd/svgd_direct_count_kernel.cuh"
#include "svgd/svgd_dispatch.cuh"
#include "svgd/svgd_sample_kernel.cuh"
#include "svgd/svgd_select_kernel.cuh"
#include "svgd/svgd_tensor_count_kernel.cuh"

namespace fused_ops {
namespace {

// A task's parts of the scratch memory, and last the radix passes'.
struct BracketMemory {
  BracketTask task;
  MedianScratch* radix;
  double* radix_sums;
};

BracketMemory make_task(const SvgdParticles& particles, BandwidthRule rule,
                        const SvgdPolicy& policy, const DeviceLimits& limits, MemoryParts& parts) {
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
  memory.radix = parts.take<MedianScratch>(1);
  memory.radix_sums = parts.take<double>(policy.first_count.blocks);
  const double count = static_cast<double>(particles.count);
  const double share = static_cast<double>(task.ranks.lower) / (0.5 * count * (count - 1));
  for (int index = 0; index < kBracket; ++index) {
    const double at = share + bracket.offset + (index - 1) * bracket.half_width;
    task.sample_ranks[index] = static_cast<unsigned>(std::clamp<int64_t>(
        static_cast<int64_t>(at * static_cast<double>(task.sample_size)), 0, task.sample_size - 1));
  }
  return memory;
}

// Blocks of a cooperative launch for `work` threads: all of them resident, 4 to a multiprocessor
// with at most 48 KB of shared memory and, by their launch bounds, 64 registers.
int64_t cooperative_blocks(int64_t work, const DeviceLimits& limits) {
  const int64_t resident = std::clamp(limits.shared_memory / (48 * 1024), 1, 4);
  return std::clamp<int64_t>(ceil_div(work, kTileThreads), 1, resident * limits.multiprocessors);
}

cudaError_t launch_cooperative(void (*kernel)(BracketTask), BracketTask& task, int64_t blocks,
                               cudaStream_t stream) {
  void* arguments[] = {&task};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel),
                                     dim3(static_cast<unsigned>(blocks)), dim3(kTileThreads),
                                     arguments, 0, stream);
}

template <int dim>
cudaError_t launch_tensor_count(const BracketTask& task, int shares, cudaStream_t stream) {
  using Shape = CountShape<dim>;
  static_assert(Shape::groups == count_groups(dim));
  constexpr auto kernel = svgd_tensor_count<dim>;
  const cudaError_t error = allow_shared_memory<kernel>();
  if (error != cudaSuccess) return error;
  const int64_t tiles = task.split.padded_count / kSplitTile;
  const dim3 grid(static_cast<unsigned>(ceil_div(tiles, Shape::groups)),
                  static_cast<unsigned>(shares));
  kernel<<<grid, Shape::threads, sizeof(CountRingShared<dim>), stream>>>(task);
  return cudaGetLastError();
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

// The radix passes, which return at once unless the bracket missed.
cudaError_t launch_radix(const BracketMemory& memory, const SvgdPolicy& policy,
                         cudaStream_t stream) {
  const BracketTask& bracket = memory.task;
  const MedianRanks& ranks = bracket.ranks;
  const MedianTask task{
      bracket.particles, nullptr, memory.radix, memory.radix_sums, policy.first_count.blocks,
      bracket.rule,      ranks,   ranks.lower,  bracket.bandwidth, &bracket.state->missed};
  const cudaError_t error = cudaMemsetAsync(memory.radix, 0, sizeof(MedianScratch), stream);
  if (error != cudaSuccess) return error;
  for (int digit = 0; digit < kSampleDigits; ++digit) {
    const int blocks = digit == 0 ? policy.first_count.blocks : policy.count.blocks;
    svgd_count<float, 4><<<blocks, kTileThreads, 0, stream>>>(task, digit);
  }
  if (ranks.upper > ranks.lower) {
    svgd_next_above<float, 4><<<policy.count.blocks, kTileThreads, 0, stream>>>(task);
  }
  return cudaGetLastError();
}

cudaError_t launch_all(BracketMemory& memory, const SvgdPolicy& policy, const DeviceLimits& limits,
                       cudaStream_t stream) {
  BracketTask& task = memory.task;
  cudaError_t error =
      launch_cooperative(svgd_sample, task, cooperative_blocks(task.sample_size, limits), stream);
  if (error != cudaSuccess) return error;
  if (task.tensor_cores) {
    dispatch_padded_dim(task.split.padded_dim, [&](auto dim) {
      error = launch_tensor_count<dim.value>(task, policy.bracket.shares, stream);
    });
    if (error != cudaSuccess) return error;
  }
  error = launch_direct_count(task, stream);
  if (error != cudaSuccess) return error;
  // A few keys to a thread.
  error =
      launch_cooperative(svgd_select, task, cooperative_blocks(task.capacity / 4, limits), stream);
  return error == cudaSuccess ? launch_radix(memory, policy, stream) : error;
}

}  // namespace

int64_t svgd_bracket_bytes(const SvgdParticles& particles, const SvgdPolicy& policy,
                           const DeviceLimits& limits) {
  MemoryParts parts(nullptr);
  make_task(particles, BandwidthRule::median, policy, limits, parts);
  return parts.bytes();
}

cudaError_t launch_svgd_bracket(const SvgdParticles& particles, const SplitParticles& split,
                                BandwidthRule rule, const SvgdPolicy& policy,
                                const DeviceLimits& limits, void* scratch, float* bandwidth,
                                cudaStream_t stream) {
  MemoryParts parts(scratch);
  BracketMemory memory = make_task(particles, rule, policy, limits, parts);
  memory.task.split = split;
  memory.task.bandwidth = bandwidth;
  return launch_all(memory, policy, limits, stream);
}

}  // namespace fused_ops
