// SPDX-License-Identifier: BSD-3-Clause
// What the kernels of the streamed update share: the shape of their tiles and their task.
//
// Beside its slots of coordinates (svgd_split.h) a tile of 64 particles j has as many of values,
// (width dimensions, 64 particles) each. A block reads its tiles as one linear stream of slots,
// those of a tile's coordinates and then those of its values.

#pragma once

#include <cuda_fp16.h>

#include "common/device/reduce.cuh"
#include "common/device/vector.cuh"
#include "svgd/svgd.h"
#include "svgd/svgd_device.cuh"
#include "svgd/svgd_formula.h"
#include "svgd/svgd_guard.cuh"
#include "svgd/svgd_split.h"

namespace fused_ops {

constexpr int kStreamThreads = 256;  // of the kernels around the streaming one

// Powers of two that keep low parts of K and V above float16's smallest number: K is at most 2^14,
// the largest value is brought to [2^13, 2^14).
constexpr float kWeightExponent = 14;
constexpr float kInverseWeightScale = 0x1p-14f;
constexpr int kValueExponent = 13;

struct StreamTask {
  SvgdUpdate update;
  SplitParticles split;
  StreamState* state;
  float* maxima;  // of |V|, one a block of svgd_stream_maximum
  int maximum_blocks;
  float* bias;     // (padded_count): -|x_i - m|^2 / (2h) * log2(e), minus infinity past the end
  __half* values;  // (padded_count / 64, padded_dim / width, slot)
  float* sums;     // (splits, own_rows, padded_dim): scaled sums of K_ij V_j over j != i
  float* weights;  // (splits, own_rows): scaled sums of K_ij over j != i
  int tiles;       // of 64 particles
  int first_tile;  // of those whose sums are wanted
  int own_tiles;   // how many those are
  int tiles_per_split;
  int splits;
};

// The particles i whose sums a task forms: whole tiles around the rows that are wanted.
__device__ inline int64_t own_rows(const StreamTask& task) {
  return int64_t{task.own_tiles} * kSplitTile;
}

// The result of one element from phi times N.
__device__ inline void store_result(const SvgdUpdate& update, int64_t row, int64_t column,
                                    float sum) {
  float value = sum / static_cast<float>(update.particles.count);
  if (update.step) {
    const auto* x = static_cast<const float*>(update.particles.data);
    value = fmaf(static_cast<float>(update.step_size), value,
                 x[row * update.particles.stride + column]);
  }
  static_cast<float*>(update.result)[(row - update.first_row) * update.particles.dim + column] =
      value;
}

}  // namespace fused_ops
