// SPDX-License-Identifier: BSD-3-Clause
#include <type_traits>

#include "svgd/svgd_dispatch.cuh"
#include "svgd/svgd_launch.h"
#include "svgd/svgd_median_launch.cuh"
#include "svgd/svgd_update_kernel.cuh"

namespace fused_ops {
namespace {

template <typename T, SteinKernel kernel>
void launch_update(const UpdateTask& task, const SvgdPolicy& policy, cudaStream_t stream) {
  const int64_t tiles_i = ceil_div(task.update.rows, kUpdateTile);
  const int64_t chunks = ceil_div(task.update.particles.dim, policy.chunk);
  const dim3 grid(static_cast<unsigned>(tiles_i * chunks), static_cast<unsigned>(policy.splits));
  const auto launch = [&](auto chunk) {
    svgd_update<T, chunk.value, kernel><<<grid, kTileThreads, 0, stream>>>(task);
  };
  if (policy.chunk == 4) return launch(std::integral_constant<int, 4>{});
  if (policy.chunk == 16) return launch(std::integral_constant<int, 16>{});
  if constexpr (kMaxChunk<T> >= 64) {
    if (policy.chunk == 32) return launch(std::integral_constant<int, 32>{});
    launch(std::integral_constant<int, 64>{});
  }
}

template <typename Launch>
void with_patch(const CountPolicy& count, Launch launch) {
  if (count.patch == 2) {
    launch(std::integral_constant<int, 2>{});
  } else {
    launch(std::integral_constant<int, 4>{});
  }
}

}  // namespace

SvgdPolicy svgd_policy(const SvgdParticles& particles, int64_t rows, int shares,
                       const DeviceLimits& limits) {
  return particles.type == ScalarType::float64
             ? choose_svgd_policy(particles.count, rows, particles.dim, shares, false,
                                  kMaxChunk<double>, kSourceTile<double>, limits)
             : choose_svgd_policy(particles.count, rows, particles.dim, shares, true,
                                  kMaxChunk<float>, kSourceTile<float>, limits);
}

int64_t svgd_distances_bytes(const SvgdParticles& particles) {
  return particles.count * particles.count * accumulate_size(particles.type);
}

int64_t svgd_median_bytes(const SvgdPolicy& policy) {
  MemoryParts parts(nullptr);
  make_median_task({}, BandwidthRule::median, policy, parts);
  return parts.bytes();
}

int64_t svgd_partial_bytes(const SvgdUpdate& update, const SvgdPolicy& policy) {
  const SvgdParticles& particles = update.particles;
  return policy.splits > 1
             ? policy.splits * update.rows * particles.dim * accumulate_size(particles.type)
             : 0;
}

cudaError_t launch_svgd_distances(const SvgdParticles& particles, void* distances,
                                  cudaStream_t stream) {
  return dispatch_wide(particles.type, [&](auto* pointer) {
    using T = std::remove_pointer_t<decltype(pointer)>;
    const auto edge = static_cast<unsigned>((particles.count + 63) / 64);
    svgd_distances<T>
        <<<dim3(edge, edge), kTileThreads, 0, stream>>>(particles, static_cast<T*>(distances));
    return cudaGetLastError();
  });
}

MedianTask make_median_task(const SvgdParticles& particles, BandwidthRule rule,
                            const SvgdPolicy& policy, MemoryParts& parts) {
  MedianTask task{};
  task.particles = particles;
  task.scratch = parts.take<MedianScratch>(1);
  task.partial_sums = parts.take<double>(policy.first_count.blocks);
  task.first_blocks = policy.first_count.blocks;
  task.rule = rule;
  task.ranks = median_ranks(rule, particles.count);
  task.rank = sought_rank(task.ranks);
  return task;
}

cudaError_t launch_svgd_median(const MedianTask& task, const SvgdPolicy& policy,
                               cudaStream_t stream) {
  const int digits = svgd_digits(task.particles.type);
  cudaError_t error = cudaMemsetAsync(task.scratch, 0, sizeof(MedianScratch), stream);
  for (int digit = 0; error == cudaSuccess && digit < digits; ++digit) {
    error = launch_svgd_digit(task, policy, digit, stream);
  }
  if (error == cudaSuccess && mean_of_two(task.ranks)) {
    error = launch_svgd_next_above(task, policy, stream);
  }
  return error;
}

cudaError_t launch_svgd_digit(const MedianTask& task, const SvgdPolicy& policy, int digit,
                              cudaStream_t stream) {
  const CountPolicy& count = digit == 0 ? policy.first_count : policy.count;
  return dispatch_wide(task.particles.type, [&](auto* pointer) {
    using T = std::remove_pointer_t<decltype(pointer)>;
    with_patch(count, [&](auto patch) {
      svgd_count<T, patch.value><<<count.blocks, kTileThreads, 0, stream>>>(task, digit);
    });
    return cudaGetLastError();
  });
}

cudaError_t launch_svgd_next_above(const MedianTask& task, const SvgdPolicy& policy,
                                   cudaStream_t stream) {
  return dispatch_wide(task.particles.type, [&](auto* pointer) {
    using T = std::remove_pointer_t<decltype(pointer)>;
    with_patch(policy.count, [&](auto patch) {
      svgd_next_above<T, patch.value><<<policy.count.blocks, kTileThreads, 0, stream>>>(task);
    });
    return cudaGetLastError();
  });
}

cudaError_t launch_svgd_bandwidth(const SvgdParticles& particles, BandwidthRule rule,
                                  const SvgdPolicy& policy, void* distances, void* scratch,
                                  void* bandwidth, cudaStream_t stream) {
  MemoryParts parts(scratch);
  MedianTask task = make_median_task(particles, rule, policy, parts);
  task.distances = distances;
  task.bandwidth = bandwidth;
  return launch_svgd_median(task, policy, stream);
}

cudaError_t launch_svgd_update(const SvgdUpdate& update, const SvgdPolicy& policy,
                               const void* distances, void* partial, cudaStream_t stream) {
  const UpdateTask task{update, distances, partial, policy.tiles_per_split};
  return dispatch_wide(update.particles.type, [&](auto* pointer) {
    using T = std::remove_pointer_t<decltype(pointer)>;
    if (update.kernel == SteinKernel::rbf) {
      launch_update<T, SteinKernel::rbf>(task, policy, stream);
    } else {
      launch_update<T, SteinKernel::imq>(task, policy, stream);
    }
    if (policy.splits > 1) {
      const int64_t size = update.rows * update.particles.dim;
      const auto blocks =
          static_cast<unsigned>(std::min<int64_t>(ceil_div(size, kTileThreads), 1024));
      svgd_update_combine<T><<<blocks, kTileThreads, 0, stream>>>(task, policy.splits);
    }
    return cudaGetLastError();
  });
}

}  // namespace fused_ops
