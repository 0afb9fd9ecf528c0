// SPDX-License-Identifier: BSD-3-Clause
// What one tile of pairs adds to phi, in both directions.
//
// A tile of bands A and B serves the particles of A (sources B) and those of B (sources A); a
// paired tile serves two bands from themselves. Either way there are two products, of the tile's
// weights with the sources' vectors, 32 dimensions at a time; each half of the block takes one.
//
// With c = repulsion / h and a centre m near the tile's particles, a target's sum is
//   rbf:  sum_j K_j (s_j - c (x_j - m)) + c (x - m) sum_j K_j                  one product
//   imq:  sum_j K_j s_j - G_j c (x_j - m) + c (x - m) sum_j G_j, G = K^3       two
// on tensor cores (svgd_small_product.cuh), which loses digits where c |x - m|^2 is large: tight
// clusters far apart. There the difference x - x_j is formed per pair in float32 instead, as the
// block finds out for each block of dimensions.

#pragma once

#include "svgd/svgd_formula.h"
#include "svgd/svgd_small_product.cuh"

namespace fused_ops {

// Greatest c (x - m)^2 of a coordinate for the centred form: it then loses a factor of at most 64
// against the differences that matter, which are of the order of c^(-1/2).
constexpr float kMaxCentred = 4096;
// Greatest vector for halves; beyond it, infinity included, float32 has to do.
constexpr float kMaxValue = 0x1p100f;

template <SteinKernel kernel>
__device__ inline float weight_of(float distance, float half_inverse) {
  if (distance < 0) return 0;  // kNoPair
  const float u = distance * half_inverse;
  return kernel == SteinKernel::rbf ? expf(-u) : rsqrtf(1.0f + u);
}

template <SteinKernel kernel, int patch>
__device__ inline void store_small_weights(const float (&distances)[patch][patch],
                                           float half_inverse, SmallPhiShared<patch>& shared) {
  const int row = patch * (threadIdx.x / 16);
  const int column = patch * (threadIdx.x % 16);
#pragma unroll
  for (int a = 0; a < patch; ++a) {
    const int place = swizzled_place<16 * patch>(row + a, column);
    if constexpr (patch == 1) {
      const float weight = weight_of<kernel>(distances[0][0], half_inverse) * kWeightScale;
      const __half high = __float2half_rn(weight);
      shared.weights[0][place] = high;
      shared.weights[1][place] = __float2half_rn(weight - __half2float(high));
    } else {
      Vector<uint32_t, patch / 2> high, low;
#pragma unroll
      for (int b = 0; b < patch; b += 2) {
        const HalfPair pair =
            split_pair(weight_of<kernel>(distances[a][b], half_inverse) * kWeightScale,
                       weight_of<kernel>(distances[a][b + 1], half_inverse) * kWeightScale);
        high.value[b / 2] = pair.high;
        low.value[b / 2] = pair.low;
      }
      store(reinterpret_cast<uint32_t*>(&shared.weights[0][place]), high);
      store(reinterpret_cast<uint32_t*>(&shared.weights[1][place]), low);
    }
  }
}

// One block of dimensions of the sources on its way from device to shared memory. A thread takes
// some rows of one dimension.
template <int patch>
struct SmallSources {
  static constexpr int edge = 16 * patch;
  static constexpr int warps = kTileThreads / kWarpSize;
  static constexpr int rows_per_band = edge / warps;
  static constexpr int centre_rows = 8;
  float centres[centre_rows];
  float coordinates[2][rows_per_band];  // x, or x - m
  float scores[2][rows_per_band];

  static __device__ int row(int i) { return i * warps + threadIdx.x / kWarpSize; }
  static __device__ int lane() { return threadIdx.x % kWarpSize; }

  template <typename scalar>
  __device__ void load(const SvgdUpdate& update, const SmallTile& tile, int d) {
    const SvgdParticles& particles = update.particles;
    const bool inside = d + lane() < particles.dim;
    const auto* x = static_cast<const scalar*>(particles.data) + d + lane();
    const auto* s = static_cast<const scalar*>(update.score) + d + lane();
#pragma unroll
    for (int i = 0; i < centre_rows; ++i) {
      const int64_t row = tile.bands[i % 2] * edge + i * (edge / centre_rows);
      const int64_t last = particles.count - 1;
      centres[i] = inside ? to_accumulate(x[(row < last ? row : last) * particles.stride]) : 0.0f;
    }
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < rows_per_band; ++i) {
        const int64_t particle = tile.bands[band] * edge + row(i);
        const bool present = inside && particle < particles.count;
        coordinates[band][i] = present ? to_accumulate(x[particle * particles.stride]) : 0.0f;
        scores[band][i] = present ? to_accumulate(s[particle * update.score_stride]) : 0.0f;
      }
    }
  }

  // Makes offsets of the coordinates, zero for what is not there, and leaves the warps' maxima in
  // `largest`. A barrier must follow.
  __device__ void centre(const SvgdParticles& particles, const SmallTile& tile, int d,
                         unsigned (&largest)[2][warps]) {
    float middle = 0;
#pragma unroll
    for (int i = 0; i < centre_rows; ++i) middle += centres[i];
    middle /= centre_rows;
    const bool inside = d + lane() < particles.dim;
    unsigned maxima[2] = {};
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < rows_per_band; ++i) {
        const bool present = inside && tile.bands[band] * edge + row(i) < particles.count;
        coordinates[band][i] = present ? coordinates[band][i] - middle : 0.0f;
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
                               SmallPhiShared<patch>& shared) const {
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < rows_per_band; ++i) {
        const float value =
            scale * fma(offset_share, coordinates[band][i], score_share * scores[band][i]);
        const __half high = __float2half_rn(value);
        const int place = swizzled_place<kDimBlock>(row(i), lane());
        shared.values[0][band][place] = high;
        shared.values[1][band][place] = __float2half_rn(value - __half2float(high));
      }
    }
  }

  __device__ void store_coordinates(SmallPhiShared<patch>& shared) const {
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < rows_per_band; ++i) {
        shared.coordinates[band][row(i)][lane()] = coordinates[band][i];
      }
    }
  }

  __device__ void store_scores(SmallPhiShared<patch>& shared) const {
#pragma unroll
    for (int band = 0; band < 2; ++band) {
#pragma unroll
      for (int i = 0; i < rows_per_band; ++i) {
        shared.scores[band][row(i)][lane()] = scores[band][i];
      }
    }
  }
};

// A power of two and its inverse.
struct ValueScale {
  float scale;
  float inverse;

  // Brings values up to `bound` to below 2^(kValueExponent + 1).
  explicit __device__ ValueScale(float bound) {
    const int exponent = max(static_cast<int>(__float_as_uint(bound) >> 23) - 127, -87);
    scale = __uint_as_float((127 + kValueExponent - exponent) << 23);
    inverse = __uint_as_float((127 - kValueExponent + exponent) << 23);
  }
};

template <int patch>
__device__ inline void scale_sums(float factor, SmallSums<patch>& sums) {
  using Share = SmallShare<patch>;
#pragma unroll
  for (int t = 0; t < Share::target_tiles; ++t) {
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.values[t][n][e] *= factor;
    }
  }
}

// Sums of a thread's share of the tile in the centred form; its weights' sums only if `totals`.
// Calls `release` when the sources have been stored for the last time.
template <SteinKernel kernel, int patch, typename Release>
__device__ inline void multiply_centred(const SmallSources<patch>& sources, bool paired,
                                        float strength, const float (&largest)[2], bool totals,
                                        SmallPhiShared<patch>& shared, SmallSums<patch>& sums,
                                        Release release) {
  using Share = SmallShare<patch>;
  constexpr bool rbf = kernel == SteinKernel::rbf;
  const int half = Share::half();
  const int band = paired ? half : 1 - half;
  sources.store_coordinates(shared);
  const ValueScale scale(rbf ? largest[1] + fabsf(strength) * largest[0] : largest[1]);
  sources.store_halves(1, rbf ? -strength : 0.0f, scale.scale, shared);
  __syncthreads();
  if constexpr (rbf) release();
  multiply_halves<false>(shared, paired, band, rbf && totals, sums);
  scale_sums(scale.inverse / kWeightScale, sums);
  if constexpr (!rbf) {
    __syncthreads();
    const ValueScale offset_scale(fabsf(strength) * largest[0]);
    sources.store_halves(0, -strength, offset_scale.scale, shared);
    __syncthreads();
    release();
    SmallSums<patch> offset_sums;
    multiply_halves<true>(shared, paired, band, true, offset_sums);
    scale_sums(offset_scale.inverse / kWeightScale, offset_sums);
#pragma unroll
    for (int t = 0; t < Share::target_tiles; ++t) {
#pragma unroll
      for (int n = 0; n < Share::dim_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums.values[t][n][e] += offset_sums.values[t][n][e];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.totals[t][e] = offset_sums.totals[t][e];
    }
  }
  // The other part of the repulsion.
#pragma unroll
  for (int t = 0; t < Share::target_tiles; ++t) {
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const auto offset =
            load<2>(&shared.coordinates[half][Share::target(t, e)][Share::dimension(n)]);
        const float total = sums.totals[t][e] * (strength / kWeightScale);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          sums.values[t][n][e + i] = fma(offset.value[i], total, sums.values[t][n][e + i]);
        }
      }
    }
  }
}

// The weight of a pair of a band with the other, or with itself.
template <int patch>
__device__ inline float stored_weight(const SmallPhiShared<patch>& shared, bool paired, int target,
                                      int source) {
  const int half = SmallShare<patch>::half();
  if (paired && source == target) return 1;
  const bool transposed = paired ? (half == 0) == (source < target) : half == 1;
  const int place =
      swizzled_place<16 * patch>(transposed ? source : target, transposed ? target : source);
  return (__half2float(shared.weights[0][place]) + __half2float(shared.weights[1][place])) *
         (1 / kWeightScale);
}

// The same with differences formed per pair, in float32.
template <SteinKernel kernel, int patch>
__device__ inline void multiply_direct(const SmallSources<patch>& sources, bool paired,
                                       float strength, SmallPhiShared<patch>& shared,
                                       SmallSums<patch>& sums) {
  using Share = SmallShare<patch>;
  const int half = Share::half();
  const int band = paired ? half : 1 - half;
  sources.store_coordinates(shared);
  sources.store_scores(shared);
  __syncthreads();
  float x[Share::target_tiles][Share::dim_tiles][4];
#pragma unroll
  for (int t = 0; t < Share::target_tiles; ++t) {
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[t][n][e] =
            shared.coordinates[half][Share::target(t, e)][Share::dimension(n) + e % 2];
        sums.values[t][n][e] = 0;
      }
    }
  }
  for (int source = 0; source < 16 * patch; ++source) {
    float k[Share::target_tiles][2], g[Share::target_tiles][2];
#pragma unroll
    for (int t = 0; t < Share::target_tiles; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float weight = stored_weight(shared, paired, Share::target(t, 2 * e), source);
        k[t][e] = weight;
        g[t][e] = (kernel == SteinKernel::rbf ? weight : weight * weight * weight) * strength;
      }
    }
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) {
      const auto s = load<2>(&shared.scores[band][source][Share::dimension(n)]);
      const auto x_j = load<2>(&shared.coordinates[band][source][Share::dimension(n)]);
#pragma unroll
      for (int t = 0; t < Share::target_tiles; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& sum = sums.values[t][n][e];
          sum = fma(k[t][e / 2], s.value[e % 2], sum);
          sum = fma(g[t][e / 2], x[t][n][e] - x_j.value[e % 2], sum);
        }
      }
    }
  }
}

// Stores the share of row 0 of a band at `rows`, (count, dim), of which `left` rows are there.
template <int patch>
__device__ inline void store_sums(const SmallSums<patch>& sums, float* rows, int left, int dim,
                                  int d) {
  using Share = SmallShare<patch>;
#pragma unroll
  for (int t = 0; t < Share::target_tiles; ++t) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int target = Share::target(t, e);
      if (target >= left) continue;
#pragma unroll
      for (int n = 0; n < Share::dim_tiles; ++n) {
        const int column = d + Share::dimension(n);
        float* element = rows + int64_t{target} * dim + column;
        if (dim % 2 == 0 && column < dim) {
          store(element, Vector<float, 2>{{sums.values[t][n][e], sums.values[t][n][e + 1]}});
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (column + i < dim) element[i] = sums.values[t][n][e + i];
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
  SmallSources<patch> sources;
  sources.template load<scalar>(update, tile, 0);  // on its way while the weights are formed
  store_small_weights<kernel>(distances, scale.half_inverse, shared);
  const int half = SmallShare<patch>::half();
  const int64_t slot = tile.band((tile.paired ? half : 1 - half) != 0);
  const int first_row = tile.band(half != 0) * edge;
  float* rows = partial + (slot * count + first_row) * dim;
  SmallSums<patch> sums;
  bool totals_due = true;
  for (int d = 0; d < dim; d += kDimBlock) {
    const auto load_next = [&] {
      if (d + kDimBlock < dim) sources.template load<scalar>(update, tile, d + kDimBlock);
    };
    sources.centre(update.particles, tile, d, shared.largest);
    __syncthreads();
    float largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned bits = 0;
#pragma unroll
      for (int warp = 0; warp < SmallPhiShared<patch>::warps; ++warp) {
        bits = max(bits, shared.largest[i][warp]);
      }
      largest[i] = __uint_as_float(bits);
    }
    const float strength = fabsf(scale.repulsion);
    const bool centred = strength * largest[0] * largest[0] <= kMaxCentred &&
                         largest[1] + strength * largest[0] <= kMaxValue;
    if (centred) {
      multiply_centred<kernel>(sources, tile.paired, scale.repulsion, largest, totals_due, shared,
                               sums, load_next);
      totals_due = false;
    } else {
      sources.template load<scalar>(update, tile, d);
      multiply_direct<kernel>(sources, tile.paired, scale.repulsion, shared, sums);
      load_next();
    }
    store_sums(sums, rows, count - first_row, dim, d);
  }
}

}  // namespace fused_ops
