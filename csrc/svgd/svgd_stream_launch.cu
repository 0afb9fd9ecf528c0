// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <type_traits>

#include "common/allow_shared_memory.h"
#include "common/memory_parts.h"
#include "svgd/svgd_direct_kernel.cuh"
#include "svgd/svgd_dispatch.cuh"
#include "svgd/svgd_stream_kernel.cuh"
#include "svgd/svgd_stream_launch.h"
#include "svgd/svgd_value_kernel.cuh"

namespace fused_ops {
namespace {

constexpr int kMaxMaximumBlocks = 256;

StreamTask make_stream_task(const SvgdUpdate& update, const SplitParticles& split,
                            const StreamPolicy& policy, MemoryParts& scratch) {
  StreamTask task{};
  task.update = update;
  task.split = split;
  task.state = scratch.take<StreamState>(1);
  if (!policy.tensor_cores) return task;
  task.tiles = static_cast<int>(split.padded_count / kSplitTile);
  task.first_tile = static_cast<int>(update.first_row / kSplitTile);
  task.own_tiles =
      static_cast<int>(ceil_div(update.first_row + update.rows, kSplitTile)) - task.first_tile;
  task.tiles_per_split = policy.tiles_per_split;
  task.splits = policy.splits;
  task.maximum_blocks = static_cast<int>(std::min<int64_t>(
      ceil_div(update.particles.count * split.padded_dim, 4 * kStreamThreads), kMaxMaximumBlocks));
  task.maxima = scratch.take<float>(kMaxMaximumBlocks);
  task.bias = scratch.take<float>(split.padded_count);
  task.values = scratch.take<__half>(split.padded_count * split.padded_dim * 2);
  task.weights = scratch.take<float>(policy.splits * int64_t{task.own_tiles} * kSplitTile);
  return task;
}

template <int dim, bool three_terms>
cudaError_t launch_sums(const StreamTask& task, cudaStream_t stream) {
  using Shape = StreamShape<dim>;
  static_assert(Shape::groups == stream_groups(dim));
  constexpr auto kernel = svgd_stream<dim, three_terms>;
  const cudaError_t error = allow_shared_memory<kernel>();
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(ceil_div(task.own_tiles, Shape::groups)),
                  static_cast<unsigned>(task.splits));
  kernel<<<grid, Shape::threads, sizeof(StreamShared<dim>), stream>>>(task);
  return cudaGetLastError();
}

cudaError_t launch_tensor(const StreamTask& task, cudaStream_t stream) {
  svgd_stream_maximum<<<task.maximum_blocks, kStreamThreads, 0, stream>>>(task);
  cudaError_t error = cudaSuccess;
  dispatch_padded_dim(task.split.padded_dim, [&](auto dim) {
    constexpr int width = split_width(dim.value);
    const dim3 grid(static_cast<unsigned>(task.tiles), dim.value / width);
    svgd_stream_tiles<width><<<grid, kStreamThreads, 0, stream>>>(task);
    error = task.update.precision == Precision::high ? launch_sums<dim.value, true>(task, stream)
                                                     : launch_sums<dim.value, false>(task, stream);
  });
  if (error != cudaSuccess) return error;
  const int64_t rows = kStreamThreads / kWarpSize;
  const auto blocks = static_cast<unsigned>(ceil_div(task.update.rows, rows));
  svgd_stream_result<<<blocks, kStreamThreads, 0, stream>>>(task);
  return cudaGetLastError();
}

template <int chunk, DirectForm form>
cudaError_t launch_chunk(const DirectTask& task, cudaStream_t stream) {
  const SvgdParticles& particles = task.update.particles;
  constexpr auto kernel = svgd_direct<chunk, form>;
  const cudaError_t error = allow_shared_memory<kernel>();
  if (error != cudaSuccess) return error;
  const int64_t tiles = ceil_div(task.update.rows, kDirectTile);
  const dim3 grid(static_cast<unsigned>(tiles * ceil_div(particles.dim, chunk)),
                  static_cast<unsigned>(task.splits));
  kernel<<<grid, kDirectThreads, sizeof(DirectShared), stream>>>(task);
  return cudaGetLastError();
}

template <DirectForm form>
cudaError_t launch_form(const DirectTask& task, int chunk, cudaStream_t stream) {
  if (chunk == 4) return launch_chunk<4, form>(task, stream);
  if (chunk == 16) return launch_chunk<16, form>(task, stream);
  if (chunk == 32) return launch_chunk<32, form>(task, stream);
  return launch_chunk<64, form>(task, stream);
}

cudaError_t launch_direct(const DirectTask& task, int chunk, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (task.update.kernel == SteinKernel::imq) {
    error = launch_form<DirectForm::imq>(task, chunk, stream);
  } else {
    error = launch_form<DirectForm::differences>(task, chunk, stream);
    if (error == cudaSuccess && task.state == nullptr) {
      error = launch_form<DirectForm::products>(task, chunk, stream);
    }
  }
  if (error != cudaSuccess || task.splits == 1) return error;
  const int64_t size = task.update.rows * task.update.particles.dim;
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>(ceil_div(size, kDirectThreads), 1024));
  svgd_direct_combine<<<blocks, kDirectThreads, 0, stream>>>(task);
  return cudaGetLastError();
}

}  // namespace

// The sums of both kernels come last and share their memory: the direct kernel runs after the other
// result is written.
int64_t svgd_stream_bytes(const SvgdUpdate& update, const SplitParticles& split,
                          const StreamPolicy& policy) {
  MemoryParts scratch(nullptr);
  const StreamTask task = make_stream_task(update, split, policy, scratch);
  const int64_t before = scratch.bytes();
  const int64_t sums = int64_t{task.splits} * task.own_tiles * kSplitTile * split.padded_dim;
  const int64_t partial =
      policy.direct_splits > 1 ? policy.direct_splits * update.rows * update.particles.dim : 0;
  return before + std::max(sums, partial) * static_cast<int64_t>(sizeof(float));
}

cudaError_t launch_svgd_stream(const SvgdUpdate& update, const SplitParticles& split,
                               const StreamPolicy& policy, void* scratch_memory,
                               cudaStream_t stream) {
  MemoryParts scratch(scratch_memory);
  StreamTask task = make_stream_task(update, split, policy, scratch);
  auto* sums = scratch.take<float>(0);
  task.sums = sums;
  const DirectTask direct{update,
                          split.mean,
                          split.scale,
                          policy.tensor_cores ? task.state : nullptr,
                          sums,
                          policy.direct_tiles_per_split,
                          policy.direct_splits};
  if (policy.tensor_cores) {
    const cudaError_t error = launch_tensor(task, stream);
    if (error != cudaSuccess) return error;
  }
  return launch_direct(direct, policy.direct_chunk, stream);
}

}  // namespace fused_ops
