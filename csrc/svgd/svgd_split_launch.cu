// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <type_traits>

#include "common/memory_parts.h"
#include "svgd/svgd_split.h"
#include "svgd/svgd_split_kernel.cuh"
#include "svgd/svgd_tuning.h"

namespace fused_ops {
namespace {

SplitTask make_split_task(const SvgdParticles& particles, bool with_slots, MemoryParts& parts) {
  SplitTask task{};
  task.particles = particles;
  SplitParticles& split = task.split;
  split.padded_count = ceil_div(particles.count, 128) * 128;
  split.padded_dim = static_cast<int>(padded_dim(particles.dim));
  if (with_slots) split.slots = parts.take<__half>(split.padded_count * split.padded_dim * 2);
  split.norms = parts.take<float>(split.padded_count);
  split.mean = parts.take<float>(particles.dim);
  split.scale = parts.take<float>(2);
  task.columns = parts.take<SplitColumn>(kSplitRowBlocks * particles.dim);
  task.maximum = parts.take<unsigned>(1);
  return task;
}

}  // namespace

int64_t svgd_split_bytes(const SvgdParticles& particles, bool with_slots) {
  MemoryParts parts(nullptr);
  make_split_task(particles, with_slots, parts);
  return parts.bytes();
}

SplitParticles svgd_split_parts(const SvgdParticles& particles, bool with_slots, void* memory) {
  MemoryParts parts(memory);
  return make_split_task(particles, with_slots, parts).split;
}

cudaError_t launch_svgd_split(const SvgdParticles& particles, bool with_slots, void* memory,
                              SplitParticles& split, cudaStream_t stream) {
  MemoryParts parts(memory);
  const SplitTask task = make_split_task(particles, with_slots, parts);
  split = task.split;
  const auto columns = static_cast<unsigned>(ceil_div(particles.dim, kSplitColumns));
  const dim3 shares(columns, kSplitRowBlocks);
  const auto means = static_cast<unsigned>(ceil_div(particles.dim, kSplitMeans));
  const auto rows = static_cast<unsigned>(
      std::min<int64_t>(ceil_div(split.padded_count, kSplitThreads / kWarpSize), 1024));
  svgd_split_columns<<<shares, kSplitThreads, 0, stream>>>(task);
  svgd_split_mean<<<means, kSplitThreads, 0, stream>>>(task);
  svgd_split_rows<<<rows, kSplitThreads, 0, stream>>>(task);
  return cudaGetLastError();
}

}  // namespace fused_ops
