// SPDX-License-Identifier: BSD-3-Clause
// The CUDA ops of a median whose pairs several processes share (svgd_share.h).

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "common/cuda_launch.h"
#include "svgd/svgd_arguments.h"
#include "svgd/svgd_forced.h"
#include "svgd/svgd_launch.h"
#include "svgd/svgd_share_launch.h"

namespace fused_ops {
namespace {

ShareCall share_call(const CudaContext& context, const SvgdParticles& particles,
                     const PairShare& share, BandwidthRule rule, int64_t form) {
  STD_TORCH_CHECK(element_size(particles.type) >= 4 && particles.count > 1,
                  "particles: expected two or more, in float32 or float64");
  const DeviceLimits limits = context.limits();
  SvgdPolicy policy = svgd_policy(particles, particles.count, share.count, limits);
  force_form(policy, svgd_form(form), false);
  return {particles, rule, policy, limits, share, nullptr};
}

std::tuple<Tensor, int64_t, int64_t> svgd_share_memory(Tensor particles, int64_t shares,
                                                       int64_t form) {
  const CudaContext context(particles);
  const Rows rows = svgd_matrix(particles);
  const ShareCall call = share_call(context, svgd_particles(rows), {0, static_cast<int>(shares)},
                                    BandwidthRule::median, form);
  const SharePasses passes = svgd_share_passes(call.particles, call.policy);
  return {new_tensor(particles, {svgd_share_bytes(call)}, kByte), passes.first, passes.next_above};
}

Tensor svgd_share_pass(Tensor particles, Tensor memory, std::optional<Tensor> received,
                       int64_t rule, int64_t pass, int64_t share, int64_t shares, int64_t form) {
  const CudaContext context(particles);
  const Rows rows = svgd_matrix(particles);
  const ShareArguments arguments(memory, received, share, shares);
  ShareCall call =
      share_call(context, svgd_particles(rows), arguments.share, bandwidth_rule(rule), form);
  call.memory = memory.mutable_data_ptr();
  Tensor message = new_tensor(particles, {share_words(arguments.share.count)}, kLong);
  check_cuda(launch_svgd_share_pass(call, static_cast<int>(pass), arguments.received,
                                    static_cast<int64_t*>(message.mutable_data_ptr()),
                                    context.stream));
  return message;
}

Tensor svgd_share_bandwidth(Tensor particles, Tensor memory, Tensor received, int64_t rule,
                            int64_t shares, int64_t form) {
  const CudaContext context(particles);
  const Rows rows = svgd_matrix(particles);
  const ShareArguments arguments(memory, received, 0, shares);
  ShareCall call =
      share_call(context, svgd_particles(rows), arguments.share, bandwidth_rule(rule), form);
  call.memory = memory.mutable_data_ptr();
  Tensor result = new_tensor(particles, {}, accumulate_dtype(call.particles.type));
  check_cuda(launch_svgd_share_bandwidth(call, arguments.received, result.mutable_data_ptr(),
                                         context.stream));
  return result;
}

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, library) {
  library.impl("svgd_share_memory", TORCH_BOX(&fused_ops::svgd_share_memory));
  library.impl("svgd_share_pass", TORCH_BOX(&fused_ops::svgd_share_pass));
  library.impl("svgd_share_bandwidth", TORCH_BOX(&fused_ops::svgd_share_bandwidth));
}
