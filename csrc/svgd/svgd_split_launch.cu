// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <type_traits>

#include "common/memory_parts.h"
#include "svgd/svgd_split.h"
#include "svgd/svgd_split_kernel.cuh"

namespace fused_ops {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

SplitTask make_split_task(const SvgdParticles& particles, MemoryParts& parts) {
  SplitTask task{};
  task.particles = particles;
  SplitParticles& split = task.split;
  split.padded_count = ceil_div(particles.count, 128) * 128;
  split.padded_dim = static_cast<int>(particles.dim <= 16   ? 16
                                      : particles.dim <= 32 ? 32
                                                            : ceil_div(particles.dim, 64) * 64);
  split.high = parts.take<__half>(split.padded_count * split.padded_dim);
  split.low = parts.take<__half>(split.padded_count * split.padded_dim);
  split.norms = parts.take<float>(split.padded_count);
  split.mean = parts.take<float>(particles.dim);
  split.scale = parts.take<float>(2);
  task.sums = parts.take<double>(kSplitRowBlocks * particles.dim);
  task.maximum = parts.take<unsigned>(1);
  return task;
}

}  // namespace

int64_t svgd_split_bytes(const SvgdParticles& particles) {
  MemoryParts parts(nullptr);
  make_split_task(particles, parts);
  return parts.bytes();
}

cudaError_t launch_svgd_split(const SvgdParticles& particles, void* memory, SplitParticles& split,
                              cudaStream_t stream) {
  MemoryParts parts(memory);
  const SplitTask task = make_split_task(particles, parts);
  split = task.split;
  return dispatch_scalar(particles.type, [&](auto* pointer) {
    using scalar = std::remove_pointer_t<decltype(pointer)>;
    if constexpr (std::is_same_v<scalar, double>) {
      return cudaErrorInvalidValue;
    } else {
      const auto columns = static_cast<unsigned>(ceil_div(particles.dim, kSplitColumns));
      const dim3 shares(columns, kSplitRowBlocks);
      const auto means = static_cast<unsigned>(ceil_div(particles.dim, kSplitThreads));
      const auto rows = static_cast<unsigned>(
          std::min<int64_t>(ceil_div(split.padded_count, kSplitThreads / kWarpSize), 1024));
      svgd_split_sums<scalar><<<shares, kSplitThreads, 0, stream>>>(task);
      svgd_split_mean<<<means, kSplitThreads, 0, stream>>>(task, kSplitRowBlocks);
      svgd_split_maximum<scalar><<<shares, kSplitThreads, 0, stream>>>(task);
      svgd_split_rows<scalar><<<rows, kSplitThreads, 0, stream>>>(task);
      return cudaGetLastError();
    }
  });
}

}  // namespace fused_ops
