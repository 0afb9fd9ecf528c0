// SPDX-License-Identifier: BSD-3-Clause
// The contract of the SVGD update between its ops and its kernels (Liu & Wang, NeurIPS 2016).
//
//   phi_i = 1/N * sum_j [ K_ij * score_j + repulsion * grad_{x_j} K_ij ]
//   rbf:  K_ij = exp(-d2_ij / (2h))            grad_{x_j} K_ij = K_ij * (x_i - x_j) / h
//   imq:  K_ij = (1 + d2_ij / (2h))^(-1/2)     grad_{x_j} K_ij = K_ij^3 / 2 * (x_i - x_j) / h
//
// d2_ij is the sum of squared differences, always taken directly: |x|^2 + |y|^2 - 2xy loses digits
// far from the origin. All arithmetic is in the accumulation type (float32; float64 for float64).

#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/scalar_type.h"

namespace fused_ops {

enum class SteinKernel : int8_t { rbf, imq };
constexpr const char* kSteinKernels[] = {"rbf", "imq"};

enum class BandwidthRule : int8_t { median, paper, reference };
constexpr const char* kBandwidthRules[] = {"median", "paper", "reference"};

// How float32 sums over many particles are formed on CUDA, named as torch names its own choice:
// highest  from direct differences
// high     on tensor cores where the data allow it, at an error of about 1e-5 of phi's norm
// medium   on tensor cores with fewer terms, at about 5e-4
enum class Precision : int8_t { highest, high, medium };
constexpr const char* kPrecisions[] = {"highest", "high", "medium"};

// Squared distances are summed over blocks of this many dimensions first, so that their error does
// not grow with the dimension.
constexpr int kDimBlock = 32;

// Up to this many particles an (N, N) matrix may be kept: 16 MB in float32.
constexpr int64_t kMaxStoredParticles = 2048;

struct SvgdParticles {
  ScalarType type;
  int64_t count;  // N
  int64_t dim;
  const void* data;  // (count, dim), rows `stride` elements apart
  int64_t stride;
};

// A part of all pairs: every count-th piece of them from piece `index` on. Processes that each
// count theirs have counted all.
struct PairShare {
  int index = 0;
  int count = 1;
};

struct SvgdUpdate {
  SvgdParticles particles;
  const void* score;  // (count, dim) in the particles' type
  int64_t score_stride;
  const void* bandwidth;    // one element of the accumulation type, or null:
  double bandwidth_number;  // then this one
  SteinKernel kernel;
  double repulsion;
  Precision precision;
  bool step;  // whether the result is particles + step_size * phi rather than phi
  double step_size;
  int64_t first_row;  // the results of particles [first_row, first_row + rows) are wanted
  int64_t rows;
  void* result;  // (rows, dim) contiguous
};

// Of independent problems that lie one behind another, problem `index`; `first` is problem 0.
FUSED_OPS_HOST_DEVICE inline SvgdUpdate nth_problem(const SvgdUpdate& first, int64_t index) {
  const auto after = [index](const void* start, int64_t elements, int64_t size) -> const void* {
    return start == nullptr ? nullptr : static_cast<const char*>(start) + index * elements * size;
  };
  const SvgdParticles& particles = first.particles;
  const int64_t size = element_size(particles.type);
  SvgdUpdate update = first;
  update.particles.data = after(particles.data, particles.count * particles.stride, size);
  update.score = after(first.score, particles.count * first.score_stride, size);
  update.bandwidth = after(first.bandwidth, 1, accumulate_size(particles.type));
  update.result = static_cast<char*>(first.result) + index * first.rows * particles.dim * size;
  return update;
}

}  // namespace fused_ops
