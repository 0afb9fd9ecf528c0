// SPDX-License-Identifier: BSD-3-Clause
// What one tile of pairs adds to phi, in both directions.
//
// A tile of bands A and B serves the particles of A (sources B) and those of B (sources A); a
// paired tile serves two bands from themselves. Either way there are two products, each of a square
// of weights, stored as [source][target], with the sources' vectors, 32 dimensions at a time; each
// half of the block takes one.
//
// With c = repulsion / h and a centre m near the tile's particles, a target's sum is
//   rbf:  sum_j K_j (s_j - c (x_j - m)) + c (x - m) sum_j K_j                  one product
//   imq:  sum_j K_j s_j - G_j (x_j - m) + (x - m) sum_j G_j, G = c K^3 / 2     two
// which loses digits where c |x - m|^2 is large: tight clusters far apart. There the difference
// x - x_j is formed per pair instead, as the block finds out for each block of dimensions.

#pragma once

#include "svgd/svgd_formula.h"
#include "svgd/svgd_small_tile.cuh"

namespace fused_ops {

// Greatest c (x - m)^2 of a coordinate for the centred form: it then loses a factor of at most 64
// against the differences that matter, which are of the order of c^(-1/2).
constexpr float kMaxCentred = 4096;

template <int patch>
struct SmallPhiShared {
  static constexpr int edge = 16 * patch;
  float weights[2][edge][edge];  // K, [source][target], targets permuted by weight_column
  alignas(16) float score[2][edge][kDimBlock];     // by band; rbf: s - c (x - m) unless direct
  alignas(16) float particle[2][edge][kDimBlock];  // x - m, or x if direct
  // The sum over the sources of what multiplies x - m, in parts so that all threads take a share.
  static constexpr int parts = kTileThreads / (2 * edge);
  float totals[parts][2][edge];
};

// Targets change places in groups of four, so that the columns of a tile, which lie a multiple of
// 32 banks apart, are stored to different banks.
template <int patch>
__device__ inline int weight_column(int source, int target) {
  return patch < 4 ? target : target ^ (source / patch % 8 * 4);
}

template <SteinKernel kernel>
__device__ inline float weight_of(float distance, float half_inverse) {
  if (distance < 0) return 0;  // kNoPair
  const float u = distance * half_inverse;
  return kernel == SteinKernel::rbf ? expf(-u) : rsqrtf(1.0f + u);
}

// G / (repulsion / h or half of it) from K.
template <SteinKernel kernel>
__device__ inline float gradient_weight(float k) {
  return kernel == SteinKernel::rbf ? k : k * k * k;
}

// Ends in a barrier.
template <SteinKernel kernel, int patch>
__device__ inline void store_small_weights(const float (&distances)[patch][patch], bool paired,
                                           int first_band_left, int second_band_left,
                                           const KernelScale<float>& scale,
                                           SmallPhiShared<patch>& shared) {
  const int row = patch * (threadIdx.x / 16);
  const int column = patch * (threadIdx.x % 16);
  // The square in which this thread's places are [column][row] and the one for [row][column].
  const int first = paired && row > column;
  const int second = !paired || row > column;
  float weights[patch][patch];
#pragma unroll
  for (int a = 0; a < patch; ++a) {
#pragma unroll
    for (int b = 0; b < patch; ++b) {
      weights[a][b] = weight_of<kernel>(distances[a][b], scale.half_inverse);
    }
  }
  constexpr int width = patch < 4 ? patch : 4;
  if (paired && row == column) {
#pragma unroll
    for (int a = 0; a < patch; ++a) {
#pragma unroll
      for (int b = 0; b < patch; ++b) {
        const int source = row + a;
        const int target = column + b;
        const float upper =
            a == b ? float(source < first_band_left) : weights[min(a, b)][max(a, b)];
        const float lower =
            a == b ? float(source < second_band_left) : weights[max(a, b)][min(a, b)];
        shared.weights[0][source][weight_column<patch>(source, target)] = upper;
        shared.weights[1][source][weight_column<patch>(source, target)] = lower;
      }
    }
  } else {
#pragma unroll
    for (int a = 0; a < patch; ++a) {
#pragma unroll
      for (int part = 0; part < patch; part += width) {
        Vector<float, width> along, across;
#pragma unroll
        for (int i = 0; i < width; ++i) {
          along.value[i] = weights[a][part + i];
          across.value[i] = weights[part + i][a];
        }
        const int along_column = weight_column<patch>(row + a, column + part);
        const int across_column = weight_column<patch>(column + a, row + part);
        store(&shared.weights[second][row + a][along_column], along);
        store(&shared.weights[first][column + a][across_column], across);
      }
    }
  }
  __syncthreads();
}

// Sums the weights of each target. A barrier must follow.
template <SteinKernel kernel, int patch>
__device__ inline void sum_weights(const KernelScale<float>& scale, SmallPhiShared<patch>& shared) {
  constexpr int edge = 16 * patch;
  constexpr int sources = edge / SmallPhiShared<patch>::parts;
  constexpr int lanes = sources < 4 ? sources : 4;  // separate sums, for speed
  const int part = threadIdx.x / (2 * edge);
  const int half = threadIdx.x / edge % 2;
  const int target = threadIdx.x % edge;
  float sums[4] = {};
#pragma unroll 4
  for (int first = 0; first < sources; first += lanes) {
#pragma unroll
    for (int i = 0; i < lanes; ++i) {
      const int source = part * sources + first + i;
      sums[i] += gradient_weight<kernel>(
          shared.weights[half][source][weight_column<patch>(source, target)]);
    }
  }
  shared.totals[part][half][target] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * scale.repulsion;
}

// Loads dimensions [d, d + 32) of both bands and says whether the differences must be formed per
// pair. Ends in a barrier.
template <typename scalar, SteinKernel kernel, int patch>
__device__ inline bool load_sources(const SvgdUpdate& update, const SmallTile& tile, int d,
                                    float strength, SmallPhiShared<patch>& shared) {
  constexpr int edge = 16 * patch;
  constexpr int warps = kTileThreads / kDimBlock;
  constexpr int rows_per_thread = 2 * edge / warps;
  const SvgdParticles& particles = update.particles;
  const int lane = threadIdx.x % kDimBlock;
  const int warp = threadIdx.x / kDimBlock;
  const bool inside = d + lane < particles.dim;
  const auto* x = static_cast<const scalar*>(particles.data) + d + lane;
  const auto* s = static_cast<const scalar*>(update.score) + d + lane;
  float centre = 0;
  constexpr int centre_rows = 8;
#pragma unroll
  for (int i = 0; i < centre_rows; ++i) {
    const int64_t row = tile.bands[i % 2] * edge + i * (edge / centre_rows);
    const int64_t last = particles.count - 1;
    if (inside) centre += to_accumulate(x[(row < last ? row : last) * particles.stride]);
  }
  centre /= centre_rows;
  float coordinates[rows_per_thread], scores[rows_per_thread];
  bool wide = false;
#pragma unroll
  for (int i = 0; i < rows_per_thread; ++i) {
    const int band = i / (rows_per_thread / 2);
    const int row = i % (rows_per_thread / 2) * warps + warp;
    const int64_t particle = int64_t{tile.bands[band]} * edge + row;
    const bool present = inside && particle < particles.count;
    coordinates[i] = present ? to_accumulate(x[particle * particles.stride]) : centre;
    scores[i] = present ? to_accumulate(s[particle * update.score_stride]) : 0;
  }
#pragma unroll
  for (int i = 0; i < rows_per_thread; ++i) {
    const int band = i / (rows_per_thread / 2);
    const int row = i % (rows_per_thread / 2) * warps + warp;
    const float offset = coordinates[i] - centre;
    wide |= !(fabsf(strength) * offset * offset <= kMaxCentred);
    shared.particle[band][row][lane] = offset;
    shared.score[band][row][lane] =
        kernel == SteinKernel::rbf ? fma(-strength, offset, scores[i]) : scores[i];
  }
  const bool direct = __syncthreads_or(wide);
  if (direct) {
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
      const int band = i / (rows_per_thread / 2);
      const int row = i % (rows_per_thread / 2) * warps + warp;
      shared.particle[band][row][lane] = coordinates[i];
      shared.score[band][row][lane] = scores[i];
    }
    __syncthreads();
  }
  return direct;
}

enum class SmallForm : int8_t { one_product, two_products, direct };

// A thread's sums: `patch` targets by four dimensions of its half's product.
template <SmallForm form, SteinKernel kernel, int patch>
__device__ inline void multiply_sources(const SmallPhiShared<patch>& shared, int half, int band,
                                        float strength, float (&sums)[patch][4]) {
  constexpr int width = patch < 4 ? patch : 4;
  const int target = patch * (threadIdx.x % 128 / 8);
  const int d = 4 * (threadIdx.x % 8);
  float x[patch][4] = {};
  if constexpr (form == SmallForm::direct) {
#pragma unroll
    for (int a = 0; a < patch; ++a) load_patch(&shared.particle[half][target + a][d], x[a]);
  }
#pragma unroll 2
  for (int first = 0; first < 16 * patch; first += patch) {
#pragma unroll
    for (int i = 0; i < patch; ++i) {
      const int source = first + i;
      float k[patch], s[4], x_j[4];
#pragma unroll
      for (int part = 0; part < patch; part += width) {
        const auto four =
            load<width>(&shared.weights[half][source][weight_column<patch>(first, target + part)]);
#pragma unroll
        for (int a = 0; a < width; ++a) k[part + a] = four.value[a];
      }
      load_patch(&shared.score[band][source][d], s);
      if constexpr (form != SmallForm::one_product) {
        load_patch(&shared.particle[band][source][d], x_j);
      }
#pragma unroll
      for (int a = 0; a < patch; ++a) {
        const float g = gradient_weight<kernel>(k[a]) * strength;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          sums[a][b] = fma(k[a], s[b], sums[a][b]);
          if constexpr (form == SmallForm::two_products) {
            sums[a][b] = fma(-g, x_j[b], sums[a][b]);
          } else if constexpr (form == SmallForm::direct) {
            sums[a][b] = fma(g, x[a][b] - x_j[b], sums[a][b]);
          }
        }
      }
    }
  }
}

// Writes the tile's sums for its bands to `partial`, (bands, count, dim): what band p receives from
// band q lies in slot q.
template <typename scalar, SteinKernel kernel, int patch>
__device__ inline void small_phi(const SvgdUpdate& update, const SmallTile& tile,
                                 const float (&distances)[patch][patch], float bandwidth,
                                 float* partial, SmallPhiShared<patch>& shared) {
  constexpr int edge = 16 * patch;
  const int count = static_cast<int>(update.particles.count);
  const int dim = static_cast<int>(update.particles.dim);
  const KernelScale<float> scale(kernel, bandwidth, static_cast<float>(update.repulsion));
  store_small_weights<kernel>(distances, tile.paired, count - tile.bands[0] * edge,
                              count - tile.bands[1] * edge, scale, shared);
  sum_weights<kernel>(scale, shared);
  const int half = threadIdx.x / 128;
  const int source_band = tile.paired ? half : 1 - half;
  const int target = patch * (threadIdx.x % 128 / 8);
  const int column = 4 * (threadIdx.x % 8);
  const int64_t slot = tile.band(source_band != 0);
  const int first_row = tile.band(half != 0) * edge + target;
  for (int d = 0; d < dim; d += kDimBlock) {
    const bool direct = load_sources<scalar, kernel>(update, tile, d, scale.repulsion, shared);
    float sums[patch][4] = {};
    if (direct) {
      multiply_sources<SmallForm::direct, kernel>(shared, half, source_band, scale.repulsion, sums);
    } else {
      constexpr SmallForm form =
          kernel == SteinKernel::rbf ? SmallForm::one_product : SmallForm::two_products;
      multiply_sources<form, kernel>(shared, half, source_band, scale.repulsion, sums);
#pragma unroll
      for (int a = 0; a < patch; ++a) {
        float total = 0;
#pragma unroll
        for (int part = 0; part < SmallPhiShared<patch>::parts; ++part) {
          total += shared.totals[part][half][target + a];
        }
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          sums[a][b] = fma(shared.particle[half][target + a][column + b], total, sums[a][b]);
        }
      }
    }
#pragma unroll
    for (int a = 0; a < patch; ++a) {
      if (first_row + a >= count) break;
      float* row = partial + (slot * count + first_row + a) * dim + d + column;
      if (dim % 4 == 0 && d + column < dim) {
        store(row, Vector<float, 4>{{sums[a][0], sums[a][1], sums[a][2], sums[a][3]}});
      } else {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          if (d + column + b < dim) row[b] = sums[a][b];
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace fused_ops
