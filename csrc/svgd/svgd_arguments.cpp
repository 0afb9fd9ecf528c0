// SPDX-License-Identifier: BSD-3-Clause
#include "svgd/svgd_arguments.h"

#include <torch/headeronly/util/Exception.h>

#include <vector>

#include "svgd/svgd_share.h"

namespace fused_ops {
namespace {

const Tensor& checked_score(const Tensor& score, const Tensor& particles) {
  STD_TORCH_CHECK(score.scalar_type() == particles.scalar_type() &&
                      score.device() == particles.device() && score.dim() == 2 &&
                      score.size(0) == particles.size(0) && score.size(1) == particles.size(1),
                  "score: expected the shape, dtype and device of particles");
  return score;
}

// How many rows from `first_row` on are wanted; by default all.
int64_t checked_rows(int64_t first_row, std::optional<int64_t> rows, const Tensor& particles) {
  const int64_t left = particles.size(0) - first_row;
  STD_TORCH_CHECK(
      first_row >= 0 && left > 0 && rows.value_or(left) > 0 && rows.value_or(left) <= left,
      "first_row and rows: expected some of the ", particles.size(0), " particles");
  return rows.value_or(left);
}

}  // namespace

Rows svgd_rows(const Tensor& particles) {
  STD_TORCH_CHECK(particles.dim() == 2 && particles.numel() > 0,
                  "particles: expected a non-empty matrix (N, dim)");
  return Rows(particles);
}

SvgdParticles svgd_particles(const Rows& rows) {
  return {kernel_scalar_type(rows.tensor, "particles"), rows.count, rows.dim,
          rows.tensor.const_data_ptr(), rows.stride};
}

BandwidthRule bandwidth_rule(int64_t rule) {
  STD_TORCH_CHECK(rule >= 0 && rule <= 2, "rule: expected 0 to 2, got ", rule);
  return static_cast<BandwidthRule>(rule);
}

SvgdArguments::SvgdArguments(const Tensor& x, const Tensor& s,
                             const std::optional<Tensor>& bandwidth, double bandwidth_number,
                             int64_t kernel, double repulsion, std::optional<double> step_size,
                             int64_t precision, int64_t first_row, std::optional<int64_t> rows)
    : particles(svgd_rows(x)),
      score(checked_score(s, x)),
      result(new_tensor(x, {checked_rows(first_row, rows, x), x.size(1)}, x.scalar_type())) {
  STD_TORCH_CHECK(kernel == 0 || kernel == 1, "kernel: expected 0 or 1, got ", kernel);
  STD_TORCH_CHECK(precision >= 0 && precision <= 2, "precision: expected 0 to 2, got ", precision);
  update = {svgd_particles(particles),
            score.tensor.const_data_ptr(),
            score.stride,
            nullptr,
            bandwidth_number,
            static_cast<SteinKernel>(kernel),
            repulsion,
            static_cast<Precision>(precision),
            step_size.has_value(),
            step_size.value_or(0),
            first_row,
            result.size(0),
            result.mutable_data_ptr()};
  if (bandwidth) {
    STD_TORCH_CHECK(bandwidth->numel() == 1 && bandwidth->device() == x.device() &&
                        bandwidth->scalar_type() == accumulate_dtype(update.particles.type),
                    "bandwidth: expected one element of the accumulation type on the device of "
                    "particles");
    update.bandwidth = bandwidth->const_data_ptr();
  }
}

ShareArguments::ShareArguments(const Tensor& memory, const std::optional<Tensor>& message,
                               int64_t index, int64_t count)
    : share{static_cast<int>(index), static_cast<int>(count)}, received(nullptr) {
  STD_TORCH_CHECK(0 <= index && index < count && count < (int64_t{1} << 20),
                  "share: expected 0 to shares - 1, got ", index, " of ", count);
  STD_TORCH_CHECK(memory.scalar_type() == kByte && memory.is_contiguous(),
                  "memory: expected that of svgd_share_memory");
  if (!message) return;
  STD_TORCH_CHECK(message->scalar_type() == kLong && message->is_contiguous() &&
                      message->device() == memory.device() &&
                      message->numel() == share_words(count),
                  "received: expected the sum of all messages");
  received = static_cast<const int64_t*>(message->const_data_ptr());
}

}  // namespace fused_ops
