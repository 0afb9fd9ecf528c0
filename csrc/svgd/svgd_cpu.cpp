// SPDX-License-Identifier: BSD-3-Clause
// The CPU ops: arguments and allocation.

#include <torch/csrc/stable/library.h>

#include <optional>

#include "svgd/svgd_arguments.h"
#include "svgd/svgd_on_cpu.h"

namespace fused_ops {
namespace {

// Calls `function` with each problem's index, several at a time where there are several.
template <typename Function>
void for_each_problem(int64_t problems, const Function& function) {
  if (problems == 1) return function(0);
  torch::stable::parallel_for(0, problems, 1, [&](int64_t begin, int64_t end) {
    for (int64_t problem = begin; problem < end; ++problem) function(problem);
  });
}

Tensor svgd_bandwidth(Tensor particles, int64_t rule, int64_t /*form*/) {
  const Rows rows = svgd_rows(particles);
  Tensor result = new_bandwidth(particles);
  SvgdUpdate first{};
  first.particles = svgd_particles(rows);
  for_each_problem(svgd_problems(particles), [&](int64_t problem) {
    with_svgd(nth_problem(first, problem).particles, true, [&](auto& svgd, auto zero) {
      auto* bandwidths = static_cast<decltype(zero)*>(result.mutable_data_ptr());
      bandwidths[problem] = svgd.bandwidth(bandwidth_rule(rule));
    });
  });
  return result;
}

Tensor svgd_update(Tensor particles, Tensor score, std::optional<Tensor> bandwidth, int64_t rule,
                   double bandwidth_number, int64_t kernel, double repulsion,
                   std::optional<double> step_size, int64_t precision, int64_t /*form*/,
                   int64_t first_row, std::optional<int64_t> wanted_rows) {
  const SvgdArguments arguments(particles, score, bandwidth, bandwidth_number, kernel, repulsion,
                                step_size, precision, first_row, wanted_rows);
  for_each_problem(arguments.problems, [&](int64_t problem) {
    const SvgdUpdate update = nth_problem(arguments.update, problem);
    with_svgd(update.particles, update.rows == update.particles.count, [&](auto& svgd, auto zero) {
      using T = decltype(zero);
      const T number = update.bandwidth != nullptr ? *static_cast<const T*>(update.bandwidth)
                       : rule >= 0                 ? svgd.bandwidth(bandwidth_rule(rule))
                                                   : static_cast<T>(update.bandwidth_number);
      svgd.update(update, number);
    });
  });
  return arguments.result;
}

Tensor svgd_distances(Tensor particles) {
  const Rows rows = svgd_matrix(particles);
  const SvgdParticles matrix = svgd_particles(rows);
  Tensor result =
      new_tensor(particles, {matrix.count, matrix.count}, accumulate_dtype(matrix.type));
  with_svgd(matrix, true, [&](auto& svgd, auto zero) {
    svgd.copy_distances(static_cast<decltype(zero)*>(result.mutable_data_ptr()));
  });
  return result;
}

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CPU, library) {
  library.impl("svgd_bandwidth", TORCH_BOX(&fused_ops::svgd_bandwidth));
  library.impl("svgd_update", TORCH_BOX(&fused_ops::svgd_update));
  library.impl("svgd_distances", TORCH_BOX(&fused_ops::svgd_distances));
}
