// SPDX-License-Identifier: BSD-3-Clause
#include <type_traits>

#include "svgd/svgd_bracket_launch.cuh"
#include "svgd/svgd_dispatch.cuh"
#include "svgd/svgd_share_kernel.cuh"
#include "svgd/svgd_share_launch.h"

namespace fused_ops {
namespace {

bool has_bracket(const ShareCall& call) { return call.policy.bracket.sample_size > 0; }

// The task without its messages; `split_memory` receives where the split particles are.
ShareTask make_share_task(const ShareCall& call, MemoryParts& parts, char*& split_memory) {
  ShareTask task{};
  const SvgdPolicy& policy = call.policy;
  if (has_bracket(call)) {
    const BracketMemory memory =
        make_bracket(call.particles, call.rule, policy, call.limits, parts);
    task.bracket = memory.task;
    task.bracket.share = call.share;
    task.radix = memory.radix;
    if (policy.bracket.tensor_cores) {
      split_memory = parts.take<char>(svgd_split_bytes(call.particles, true));
      task.bracket.split = svgd_split_parts(call.particles, true, split_memory);
    }
  } else {
    task.radix = make_median_task(call.particles, call.rule, policy, parts);
  }
  task.radix.share = call.share;
  task.radix.shared = true;
  return task;
}

cudaError_t launch_receive(const ShareTask& task, int pass, cudaStream_t stream) {
  return dispatch_wide(task.radix.particles.type, [&](auto* pointer) {
    using T = std::remove_pointer_t<decltype(pointer)>;
    svgd_share_receive<T><<<1, kTileThreads, 0, stream>>>(task, pass);
    return cudaGetLastError();
  });
}

cudaError_t launch_send(const ShareTask& task, int pass, cudaStream_t stream) {
  return dispatch_wide(task.radix.particles.type, [&](auto* pointer) {
    using T = std::remove_pointer_t<decltype(pointer)>;
    svgd_share_send<T><<<1, kTileThreads, 0, stream>>>(task, pass);
    return cudaGetLastError();
  });
}

cudaError_t start(const ShareCall& call, ShareTask& task, void* split_memory, cudaStream_t stream) {
  cudaError_t error = cudaMemsetAsync(task.radix.scratch, 0, sizeof(MedianScratch), stream);
  if (error == cudaSuccess && split_memory != nullptr) {
    error = launch_svgd_split(call.particles, true, split_memory, task.bracket.split, stream);
  }
  if (error == cudaSuccess && has_bracket(call)) {
    error = launch_bracket_sample(task.bracket, call.limits, stream);
  }
  return error;
}

// What a pass counts.
cudaError_t launch_count(const ShareCall& call, const ShareTask& task, int pass,
                         cudaStream_t stream) {
  const int digit = pass - SharePasses::digits;
  const bool above = digit == svgd_digits(call.particles.type);
  const auto blocks =
      static_cast<unsigned>(cooperative_blocks(task.bracket.capacity / 4, call.limits));
  if (pass == SharePasses::products) {
    return task.bracket.tensor_cores ? launch_tensor_count(task.bracket, call.policy, stream)
                                     : cudaSuccess;
  }
  if (pass == SharePasses::direct) return launch_direct_count(task.bracket, stream);
  if (pass == SharePasses::narrow) {
    svgd_share_narrow<<<blocks, kTileThreads, 0, stream>>>(task.bracket);
    return cudaGetLastError();
  }
  if (above && !mean_of_two(task.radix.ranks)) return cudaSuccess;
  if (has_bracket(call) && above) {
    svgd_share_above<<<blocks, kTileThreads, 0, stream>>>(task);
  } else if (has_bracket(call)) {
    svgd_share_digit<<<blocks, kTileThreads, 0, stream>>>(task, digit);
  }
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  // With a bracket these do nothing unless it missed.
  return above ? launch_svgd_next_above(task.radix, call.policy, stream)
               : launch_svgd_digit(task.radix, call.policy, digit, stream);
}

}  // namespace

SharePasses svgd_share_passes(const SvgdParticles& particles, const SvgdPolicy& policy) {
  return {policy.bracket.sample_size > 0, svgd_digits(particles.type)};
}

int64_t svgd_share_bytes(const ShareCall& call) {
  MemoryParts parts(nullptr);
  char* split_memory = nullptr;
  make_share_task(call, parts, split_memory);
  return parts.bytes();
}

cudaError_t launch_svgd_share_pass(const ShareCall& call, int pass, const int64_t* received,
                                   int64_t* sent, cudaStream_t stream) {
  MemoryParts parts(call.memory);
  char* split_memory = nullptr;
  ShareTask task = make_share_task(call, parts, split_memory);
  task.received = reinterpret_cast<const long long*>(received);
  task.sent = reinterpret_cast<long long*>(sent);
  cudaError_t error = pass == svgd_share_passes(call.particles, call.policy).first
                          ? start(call, task, split_memory, stream)
                          : launch_receive(task, pass - 1, stream);
  if (error == cudaSuccess) error = launch_count(call, task, pass, stream);
  return error == cudaSuccess ? launch_send(task, pass, stream) : error;
}

cudaError_t launch_svgd_share_bandwidth(const ShareCall& call, const int64_t* received,
                                        void* bandwidth, cudaStream_t stream) {
  MemoryParts parts(call.memory);
  char* split_memory = nullptr;
  ShareTask task = make_share_task(call, parts, split_memory);
  task.received = reinterpret_cast<const long long*>(received);
  task.radix.bandwidth = bandwidth;
  return launch_receive(task, svgd_share_passes(call.particles, call.policy).next_above, stream);
}

}  // namespace fused_ops
