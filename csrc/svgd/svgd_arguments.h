// SPDX-License-Identifier: BSD-3-Clause
// What the CPU and CUDA ops of SVGD share before their kernels differ.

#pragma once

#include <cstdint>
#include <optional>

#include "common/tensors.h"
#include "svgd/svgd.h"

namespace fused_ops {

constexpr auto kByte = torch::headeronly::ScalarType::Byte;
constexpr auto kLong = torch::headeronly::ScalarType::Long;

// Each raises where the arguments are not ones that the kernels take. Particles (N, dim) are one
// problem; (problems, N, dim) are independent ones, all rows in `Rows`, and `svgd_particles` are
// those of the first.
Rows svgd_rows(const Tensor& particles);
Rows svgd_matrix(const Tensor& particles);  // of one problem only
int64_t svgd_problems(const Tensor& particles);
SvgdParticles svgd_particles(const Rows& rows);
BandwidthRule bandwidth_rule(int64_t rule);

// A tensor with an element for each problem, 0-dim for particles (N, dim).
Tensor new_bandwidth(const Tensor& particles);

// The arguments of svgd_update, and its result allocated. The members keep alive what `update`
// points to, the first of the problems. `update.bandwidth` is the tensor's where one was given.
struct SvgdArguments {
  SvgdArguments(const Tensor& particles, const Tensor& score,
                const std::optional<Tensor>& bandwidth, double bandwidth_number, int64_t kernel,
                double repulsion, std::optional<double> step_size, int64_t precision,
                int64_t first_row, std::optional<int64_t> rows);

  Rows particles, score;
  int64_t problems;
  Tensor result;
  SvgdUpdate update;
};

// What a pass of svgd_share.h is given besides the particles.
struct ShareArguments {
  ShareArguments(const Tensor& memory, const std::optional<Tensor>& message, int64_t index,
                 int64_t count);

  PairShare share;
  const int64_t* received;  // or null
};

}  // namespace fused_ops
