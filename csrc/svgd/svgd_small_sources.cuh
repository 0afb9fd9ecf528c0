// SPDX-License-Identifier: BSD-3-Clause
// The vectors that a tile's weights multiply: its particles around a centre, and their scores.

#pragma once

#include "svgd/svgd_small_product.cuh"

namespace fused_ops {

// One block of dimensions of the sources on its way from device to shared memory. A thread takes
// some rows of one dimension.
template <int size>
struct SmallSources {
  static constexpr int edge = SmallShape<size>::edge;
  static constexpr int warps = SmallShape<size>::warps;
  static constexpr int rows_per_band = edge / warps;
  static constexpr int centre_rows = 2;  // of a band
  float centres[2][centre_rows];
  float coordinates[2][rows_per_band];  // x, or x - m
  float scores[2][rows_per_band];

  static __device__ int row(int i) { return i * warps + threadIdx.x / kWarpSize; }
  static __device__ int lane() { return threadIdx.x % kWarpSize; }

  // Rows of a band that this thread's column has, from its first one on.
  static __device__ int rows_left(const SvgdParticles& particles, const SmallTile& tile, int band,
                                  int d) {
    const int first = tile.bands[band] * edge + row(0);
    return d + lane() < particles.dim ? static_cast<int>(particles.count) - first : 0;
  }

  __device__ void load(const SvgdUpdate& update, const SmallTile& tile, int d) {
    const SvgdParticles& particles = update.particles;
    const int column = d + lane() < particles.dim ? d + lane() : 0;
    const auto* data = static_cast<const float*>(particles.data) + column;
    const int last = static_cast<int>(particles.count) - 1;
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < centre_rows; ++i) {
        const int row = tile.bands[band] * edge + i * (edge / centre_rows);
        centres[band][i] = data[min(row, last) * particles.stride];
      }
    }
    const int64_t step = warps * particles.stride;
    const int64_t score_step = warps * update.score_stride;
#pragma unroll
    for (int band = 0; band < 2; ++band) {
      const int first = tile.bands[band] * edge + row(0);
      const int left = rows_left(particles, tile, band, d);
      const auto* x = data + first * particles.stride;
      const auto* s =
          static_cast<const float*>(update.score) + column + first * update.score_stride;
#pragma unroll
      for (int i = 0; i < rows_per_band; ++i) {
        coordinates[band][i] = i * warps < left ? *x : 0.0f;
        scores[band][i] = i * warps < left ? *s : 0.0f;
        x += step;
        s += score_step;
      }
    }
  }

  // Makes offsets of the coordinates, zero for what is not there, and leaves the warps' maxima in
  // `largest`. A barrier must follow.
  __device__ void centre(const SvgdParticles& particles, const SmallTile& tile, int d,
                         unsigned (&largest)[2][warps]) {
    float middle = 0;
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < centre_rows; ++i) middle += centres[band][i];
    }
    middle /= 2 * centre_rows;
    unsigned maxima[2] = {};
#pragma unroll
    for (int band = 0; band < 2; ++band) {
      const int left = rows_left(particles, tile, band, d);
#pragma unroll
      for (int i = 0; i < rows_per_band; ++i) {
        coordinates[band][i] = i * warps < left ? coordinates[band][i] - middle : 0.0f;
        maxima[0] = max(maxima[0], __float_as_uint(fabsf(coordinates[band][i])));
        maxima[1] = max(maxima[1], __float_as_uint(fabsf(scores[band][i])));
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
        maxima[i] = max(maxima[i], __shfl_xor_sync(0xffffffffu, maxima[i], mask));
      }
      if (lane() == 0) largest[i][threadIdx.x / kWarpSize] = maxima[i];
    }
  }

  // Stores scale * (score_share * score + offset_share * (x - m)) in halves.
  __device__ void store_halves(float score_share, float offset_share, float scale,
                               SmallPhiShared<size>& shared) const {
    static_assert(warps % 8 == 0, "a thread's rows are swizzled alike");
    const int place = swizzled_place<kDimBlock>(row(0), lane());
#pragma unroll
    for (int band = 0; band < 2; ++band) {
      __half* high_row = &shared.values[0][band][place];
      __half* low_row = &shared.values[1][band][place];
#pragma unroll
      for (int i = 0; i < rows_per_band; ++i) {
        const float value =
            scale * fma(offset_share, coordinates[band][i], score_share * scores[band][i]);
        const __half high = __float2half_rn(value);
        high_row[i * warps * kDimBlock] = high;
        low_row[i * warps * kDimBlock] = __float2half_rn(value - __half2float(high));
      }
    }
  }

  __device__ void store_coordinates(SmallPhiShared<size>& shared) const {
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < rows_per_band; ++i) {
        shared.coordinates[band][row(i)][lane()] = coordinates[band][i];
      }
    }
  }

  __device__ void store_scores(SmallPhiShared<size>& shared) const {
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < rows_per_band; ++i) {
        shared.scores[band][row(i)][lane()] = scores[band][i];
      }
    }
  }
};

}  // namespace fused_ops
