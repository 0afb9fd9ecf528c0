// SPDX-License-Identifier: BSD-3-Clause
#include "svgd/svgd_arguments.h"

#include <torch/headeronly/util/Exception.h>

#include <vector>

#include "svgd/svgd_share.h"

namespace fused_ops {
namespace {

const Tensor& checked_score(const Tensor& score, const Tensor& particles) {
  bool alike = score.scalar_type() == particles.scalar_type() &&
               score.device() == particles.device() && score.dim() == particles.dim();
  for (int64_t d = 0; alike && d < score.dim(); ++d) alike = score.size(d) == particles.size(d);
  STD_TORCH_CHECK(alike, "score: expected the shape, dtype and device of particles");
  return score;
}

// The shape of the result: that of the particles with the rows that are wanted, by default all from
// `first_row` on.
std::vector<int64_t> result_shape(int64_t first_row, std::optional<int64_t> rows,
                                  const Tensor& particles) {
  std::vector<int64_t> shape(particles.dim());
  for (int64_t d = 0; d < particles.dim(); ++d) shape[d] = particles.size(d);
  int64_t& count = shape[shape.size() - 2];
  const int64_t left = count - first_row;
  STD_TORCH_CHECK(
      first_row >= 0 && left > 0 && rows.value_or(left) > 0 && rows.value_or(left) <= left,
      "first_row and rows: expected some of the ", count, " particles");
  STD_TORCH_CHECK(particles.dim() == 2 || rows.value_or(left) == count,
                  "first_row and rows: expected all of several problems");
  count = rows.value_or(left);
  return shape;
}

}  // namespace

Rows svgd_rows(const Tensor& particles) {
  STD_TORCH_CHECK((particles.dim() == 2 || particles.dim() == 3) && particles.numel() > 0,
                  "particles: expected a non-empty (N, dim) or (problems, N, dim)");
  return Rows(particles);
}

Rows svgd_matrix(const Tensor& particles) {
  STD_TORCH_CHECK(particles.dim() == 2 && particles.numel() > 0,
                  "particles: expected a non-empty matrix (N, dim)");
  return Rows(particles);
}

int64_t svgd_problems(const Tensor& particles) {
  return particles.dim() == 3 ? particles.size(0) : 1;
}

SvgdParticles svgd_particles(const Rows& rows) {
  return {kernel_scalar_type(rows.tensor, "particles"), rows.count / svgd_problems(rows.tensor),
          rows.dim, rows.tensor.const_data_ptr(), rows.stride};
}

Tensor new_bandwidth(const Tensor& particles) {
  std::vector<int64_t> shape;
  if (particles.dim() == 3) shape.push_back(particles.size(0));
  return new_tensor(particles, shape, accumulate_dtype(kernel_scalar_type(particles, "particles")));
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
      problems(svgd_problems(x)),
      result(new_tensor(x, result_shape(first_row, rows, x), x.scalar_type())) {
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
            result.size(result.dim() - 2),
            result.mutable_data_ptr()};
  if (bandwidth) {
    STD_TORCH_CHECK(bandwidth->numel() == problems && bandwidth->is_contiguous() &&
                        bandwidth->device() == x.device() &&
                        bandwidth->scalar_type() == accumulate_dtype(update.particles.type),
                    "bandwidth: expected one element for each problem, of the accumulation type on "
                    "the device of particles");
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
