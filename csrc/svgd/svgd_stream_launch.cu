// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <string_view>
#include <type_traits>

#include "common/memory_parts.h"
#include "svgd/svgd_direct_kernel.cuh"
#include "svgd/svgd_stream_kernel.cuh"
#include "svgd/svgd_stream_launch.h"
#include "svgd/svgd_value_kernel.cuh"

namespace fused_ops {
namespace {

constexpr int kMaxMaximumBlocks = 256;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename Function>
void dispatch_padded_dim(int padded_dim, Function&& function) {
  switch (padded_dim) {
    case 16:
      return function(std::integral_constant<int, 16>{});
    case 32:
      return function(std::integral_constant<int, 32>{});
    case 64:
      return function(std::integral_constant<int, 64>{});
    case 128:
      return function(std::integral_constant<int, 128>{});
    case 192:
      return function(std::integral_constant<int, 192>{});
    default:
      return function(std::integral_constant<int, 256>{});
  }
}

// The elements of 16 and 32 bits that these kernels take.
template <typename Function>
cudaError_t dispatch_single(ScalarType type, Function&& function) {
  return dispatch_scalar(type, [&](auto* pointer) {
    if constexpr (std::is_same_v<decltype(pointer), double*>) {
      return cudaErrorInvalidValue;
    } else {
      return function(pointer);
    }
  });
}

// wgmma is in code for compute capability 9.0a alone.
constexpr bool kHasTensorKernels =
    std::string_view(FUSED_OPS_ARCHITECTURES).find("9.0a") != std::string_view::npos;

StreamPolicy current_policy(const SvgdUpdate& update, int padded_dim) {
  int device = 0, multiprocessors = 1, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return choose_stream_policy(update, padded_dim, multiprocessors, 10 * major + minor);
}

StreamTask make_stream_task(const SvgdUpdate& update, const SplitParticles& split,
                            const StreamPolicy& policy, MemoryParts& scratch) {
  StreamTask task{};
  task.update = update;
  task.split = split;
  task.state = scratch.take<StreamState>(1);
  if (!policy.tensor_cores) return task;
  task.tiles = static_cast<int>(split.padded_count / kStreamTile);
  task.tiles_per_split = policy.tiles_per_split;
  task.splits = policy.splits;
  task.maximum_blocks = static_cast<int>(std::min<int64_t>(
      ceil_div(update.particles.count * split.padded_dim, 4 * kStreamThreads), kMaxMaximumBlocks));
  task.maxima = scratch.take<float>(kMaxMaximumBlocks);
  task.bias = scratch.take<float>(split.padded_count);
  task.slots = scratch.take<__half>(split.padded_count * split.padded_dim * 4);
  task.weights = scratch.take<float>(policy.splits * split.padded_count);
  return task;
}

template <int dim, bool three_terms>
cudaError_t launch_sums(const StreamTask& task, cudaStream_t stream) {
  using Shape = StreamShape<dim>;
  constexpr int bytes = sizeof(StreamShared<dim>);
  const auto kernel = svgd_stream<dim, three_terms>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(ceil_div(task.tiles, Shape::groups)),
                  static_cast<unsigned>(task.splits));
  kernel<<<grid, Shape::threads, bytes, stream>>>(task);
  return cudaGetLastError();
}

template <typename scalar>
cudaError_t launch_tensor(const StreamTask& task, cudaStream_t stream) {
  svgd_stream_maximum<scalar><<<task.maximum_blocks, kStreamThreads, 0, stream>>>(task);
  cudaError_t error = cudaSuccess;
  dispatch_padded_dim(task.split.padded_dim, [&](auto dim) {
    constexpr int width = stream_width(dim.value);
    const dim3 grid(static_cast<unsigned>(task.tiles), dim.value / width);
    svgd_stream_tiles<scalar, width><<<grid, kStreamThreads, 0, stream>>>(task);
    error = task.update.precision == Precision::high ? launch_sums<dim.value, true>(task, stream)
                                                     : launch_sums<dim.value, false>(task, stream);
  });
  if (error != cudaSuccess) return error;
  const int64_t rows = kStreamThreads / kWarpSize;
  const auto blocks = static_cast<unsigned>(ceil_div(task.update.particles.count, rows));
  svgd_stream_result<scalar><<<blocks, kStreamThreads, 0, stream>>>(task);
  return cudaGetLastError();
}

template <typename scalar, int chunk, DirectForm form>
cudaError_t launch_chunk(const DirectTask& task, cudaStream_t stream) {
  const SvgdParticles& particles = task.update.particles;
  constexpr int bytes = sizeof(DirectShared);
  const auto kernel = svgd_direct<scalar, chunk, form>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int64_t tiles = ceil_div(particles.count, kDirectTile);
  const dim3 grid(static_cast<unsigned>(tiles * ceil_div(particles.dim, chunk)),
                  static_cast<unsigned>(task.splits));
  kernel<<<grid, kDirectThreads, bytes, stream>>>(task);
  return cudaGetLastError();
}

template <typename scalar, DirectForm form>
cudaError_t launch_form(const DirectTask& task, int chunk, cudaStream_t stream) {
  if (chunk == 4) return launch_chunk<scalar, 4, form>(task, stream);
  if (chunk == 16) return launch_chunk<scalar, 16, form>(task, stream);
  if (chunk == 32) return launch_chunk<scalar, 32, form>(task, stream);
  return launch_chunk<scalar, 64, form>(task, stream);
}

template <typename scalar>
cudaError_t launch_direct(const DirectTask& task, int chunk, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (task.update.kernel == SteinKernel::imq) {
    error = launch_form<scalar, DirectForm::imq>(task, chunk, stream);
  } else {
    error = launch_form<scalar, DirectForm::differences>(task, chunk, stream);
    if (error == cudaSuccess && task.state == nullptr) {
      error = launch_form<scalar, DirectForm::products>(task, chunk, stream);
    }
  }
  if (error != cudaSuccess || task.splits == 1) return error;
  const int64_t size = task.update.particles.count * task.update.particles.dim;
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>(ceil_div(size, kDirectThreads), 1024));
  svgd_direct_combine<scalar><<<blocks, kDirectThreads, 0, stream>>>(task);
  return cudaGetLastError();
}

// Splits of `tiles` that fill `places` with `blocks` blocks a split in as few waves as possible:
// at most 8, for the memory of their sums, and each of 4 tiles or more, for their start. A split's
// sum in float32 loses digits with its length, hence 128 tiles at most while the 8 last.
int choose_splits(int64_t tiles, int64_t blocks, int64_t places) {
  constexpr int64_t most = 8;
  const int least = static_cast<int>(std::min(ceil_div(tiles, 128), most));
  int best = least;
  double best_time = 0;
  for (int splits = least; splits <= most; ++splits) {
    const int64_t tiles_per_split = ceil_div(tiles, splits);
    if (splits > least && tiles_per_split < 4) break;
    // A block costs its tiles and about one more.
    const double time = static_cast<double>(ceil_div(blocks * splits, places)) *
                        static_cast<double>(tiles_per_split + 1);
    if (splits == least || time < 0.97 * best_time) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

}  // namespace

StreamPolicy choose_stream_policy(const SvgdUpdate& update, int padded_dim, int multiprocessors,
                                  int capability) {
  const SvgdParticles& particles = update.particles;
  StreamPolicy policy{};
  // In few dimensions phi is a small difference of large sums, which wants the digits of direct
  // differences: H200, Gaussian, 65536 x 2: 5e-5 on tensor cores; 65536 x 16: 1e-5.
  const int64_t least_dim = update.precision == Precision::medium ? 1 : 16;
  policy.tensor_cores = kHasTensorKernels && capability == 90 &&
                        update.precision != Precision::highest &&
                        update.kernel == SteinKernel::rbf && particles.dim >= least_dim &&
                        padded_dim <= kMaxStreamDim;
  const int64_t tiles = ceil_div(particles.count, 128) * 2;
  const int groups = padded_dim <= 64 ? StreamShape<64>::groups : StreamShape<128>::groups;
  policy.splits = choose_splits(tiles, ceil_div(tiles, groups), multiprocessors);
  policy.tiles_per_split = static_cast<int>(ceil_div(tiles, policy.splits));
  policy.splits = static_cast<int>(ceil_div(tiles, policy.tiles_per_split));

  policy.direct_chunk = 4;
  for (const int chunk : {16, 32, 64}) {
    if (policy.direct_chunk < particles.dim) policy.direct_chunk = chunk;
  }
  const int64_t sources = ceil_div(particles.count, kDirectSource);
  const int64_t blocks =
      ceil_div(particles.count, kDirectTile) * ceil_div(particles.dim, policy.direct_chunk);
  policy.direct_splits = choose_splits(sources, blocks, 2 * multiprocessors);
  policy.direct_tiles_per_split = ceil_div(sources, policy.direct_splits);
  policy.direct_splits = static_cast<int>(ceil_div(sources, policy.direct_tiles_per_split));
  return policy;
}

// The sums of both kernels come last and share their memory: the direct kernel runs after the other
// result is written.
int64_t svgd_stream_bytes(const SvgdUpdate& update, const SplitParticles& split) {
  const StreamPolicy policy = current_policy(update, split.padded_dim);
  MemoryParts scratch(nullptr);
  make_stream_task(update, split, policy, scratch);
  const int64_t before = scratch.bytes();
  const int64_t sums =
      policy.tensor_cores ? policy.splits * split.padded_count * split.padded_dim : 0;
  const int64_t partial = policy.direct_splits > 1
                              ? policy.direct_splits * update.particles.count * update.particles.dim
                              : 0;
  return before + std::max(sums, partial) * static_cast<int64_t>(sizeof(float));
}

cudaError_t launch_svgd_stream(const SvgdUpdate& update, const SplitParticles& split,
                               void* scratch_memory, cudaStream_t stream) {
  const StreamPolicy policy = current_policy(update, split.padded_dim);
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
  return dispatch_single(update.particles.type, [&](auto* pointer) {
    using scalar = std::remove_pointer_t<decltype(pointer)>;
    if (policy.tensor_cores) {
      const cudaError_t error = launch_tensor<scalar>(task, stream);
      if (error != cudaSuccess) return error;
    }
    return launch_direct<scalar>(direct, policy.direct_chunk, stream);
  });
}

}  // namespace fused_ops
