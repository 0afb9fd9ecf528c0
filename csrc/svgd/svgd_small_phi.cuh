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

#include "svgd/svgd_device.cuh"
#include "svgd/svgd_formula.h"
#include "svgd/svgd_small_product.cuh"
#include "svgd/svgd_small_sources.cuh"

namespace fused_ops {

// Greatest c (x - m)^2 of a coordinate for the centred form: it then loses a factor of at most 64
// against the differences that matter, which are of the order of c^(-1/2).
constexpr float kMaxCentred = 4096;
// Greatest vector for halves; beyond it, infinity included, float32 has to do.
constexpr float kMaxValue = 0x1p100f;

// Times kWeightScale. The power of two is good to 2^-22, and its exponent to 2^-24 of itself.
template <SteinKernel kernel, bool accurate>
__device__ inline float scaled_weight(float distance, const KernelScale<float>& scale) {
  float weight;
  if constexpr (kernel == SteinKernel::rbf && accurate) {
    weight = kWeightScale * accurate_weight(scale, distance);
  } else if constexpr (kernel == SteinKernel::rbf) {
    weight = exp2_approximate(fma(distance, -scale.slope, kWeightExponent));
  } else {
    weight = kWeightScale * rsqrtf(fma(distance, scale.half_inverse, 1.0f));
  }
  return distance == kNoPair ? 0.0f : weight;
}

template <SteinKernel kernel, bool accurate, int size>
__device__ inline void store_small_weights(const SmallDistances<size>& distances,
                                           const KernelScale<float>& scale,
                                           SmallPhiShared<size>& shared) {
  constexpr int patch = SmallShape<size>::patch;
  const int row = patch * distances.row();
  const int column = patch * distances.column();
#pragma unroll
  for (int a = 0; a < patch; ++a) {
    const int place = swizzled_place<SmallShape<size>::edge>(row + a, column);
    if constexpr (patch == 1) {
      const float weight = scaled_weight<kernel, accurate>(distances.at[0][0], scale);
      const __half high = __float2half_rn(weight);
      shared.weights[0][place] = high;
      shared.weights[1][place] = __float2half_rn(weight - __half2float(high));
    } else {
      Vector<uint32_t, patch / 2> high, low;
#pragma unroll
      for (int b = 0; b < patch; b += 2) {
        const HalfPair pair =
            split_pair(scaled_weight<kernel, accurate>(distances.at[a][b], scale),
                       scaled_weight<kernel, accurate>(distances.at[a][b + 1], scale));
        high.value[b / 2] = pair.high;
        low.value[b / 2] = pair.low;
      }
      store(reinterpret_cast<uint32_t*>(&shared.weights[0][place]), high);
      store(reinterpret_cast<uint32_t*>(&shared.weights[1][place]), low);
    }
  }
}

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

template <int size>
__device__ inline void scale_sums(float factor, SmallSums<size>& sums) {
#pragma unroll
  for (int n = 0; n < SmallShare<size>::dim_tiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.values[n][e] *= factor;
  }
}

// Sums of a thread's share of the tile in the centred form; its weights' sums only if `totals`.
// Calls `release` when the sources have been stored for the last time.
template <SteinKernel kernel, int size, typename Release>
__device__ inline void multiply_centred(const SmallSources<size>& sources, bool paired,
                                        float strength, const float (&largest)[2], bool totals,
                                        SmallPhiShared<size>& shared, SmallSums<size>& sums,
                                        Release release) {
  using Share = SmallShare<size>;
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
    SmallSums<size> offset_sums;
    multiply_halves<true>(shared, paired, band, true, offset_sums);
    scale_sums(offset_scale.inverse / kWeightScale, offset_sums);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int n = 0; n < Share::dim_tiles; ++n) sums.values[n][e] += offset_sums.values[n][e];
      sums.totals[e] = offset_sums.totals[e];
    }
  }
  // The other part of the repulsion.
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const float total = sums.totals[e] * (strength / kWeightScale);
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) {
      const auto offset = load<2>(&shared.coordinates[half][Share::target(e)][Share::dimension(n)]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums.values[n][e + i] = fma(offset.value[i], total, sums.values[n][e + i]);
      }
    }
  }
}

// The weight of a pair of a band with the other, or with itself.
template <int size>
__device__ inline float stored_weight(const SmallPhiShared<size>& shared, bool paired, int target,
                                      int source) {
  const int half = SmallShare<size>::half();
  if (paired && source == target) return 1;
  const bool transposed = paired ? (half == 0) == (source < target) : half == 1;
  const int place = swizzled_place<SmallShape<size>::edge>(transposed ? source : target,
                                                           transposed ? target : source);
  return (__half2float(shared.weights[0][place]) + __half2float(shared.weights[1][place])) *
         (1 / kWeightScale);
}

// The same with differences formed per pair, in float32.
template <SteinKernel kernel, int size>
__device__ inline void multiply_direct(const SmallSources<size>& sources, bool paired,
                                       float strength, SmallPhiShared<size>& shared,
                                       SmallSums<size>& sums) {
  using Share = SmallShare<size>;
  const int half = Share::half();
  const int band = paired ? half : 1 - half;
  sources.store_coordinates(shared);
  sources.store_scores(shared);
  __syncthreads();
  float x[Share::dim_tiles][4];
#pragma unroll
  for (int n = 0; n < Share::dim_tiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[n][e] = shared.coordinates[half][Share::target(e)][Share::dimension(n) + e % 2];
      sums.values[n][e] = 0;
    }
  }
#pragma unroll 2
  for (int source = 0; source < SmallShape<size>::edge; ++source) {
    float k[2], g[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      k[e] = stored_weight(shared, paired, Share::target(2 * e), source);
      g[e] = (kernel == SteinKernel::rbf ? k[e] : k[e] * k[e] * k[e]) * strength;
    }
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) {
      const auto s = load<2>(&shared.scores[band][source][Share::dimension(n)]);
      const auto x_j = load<2>(&shared.coordinates[band][source][Share::dimension(n)]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = sums.values[n][e];
        sum = fma(k[e / 2], s.value[e % 2], sum);
        sum = fma(g[e / 2], x[n][e] - x_j.value[e % 2], sum);
      }
    }
  }
}

// Stores the sums for a band whose row 0 is at `rows`, (count, dim), of which `left` rows are
// there.
template <int size>
__device__ inline void store_sums(const SmallSums<size>& sums, float* rows, int left, int dim,
                                  int d) {
  using Share = SmallShare<size>;
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const int target = Share::target(e);
    if (target >= left) continue;
    float* element = rows + target * dim + d;
#pragma unroll
    for (int n = 0; n < Share::dim_tiles; ++n) {
      const int column = Share::dimension(n);
      if (dim % 2 == 0) {
        if (d + column >= dim) continue;
        store(element + column, Vector<float, 2>{{sums.values[n][e], sums.values[n][e + 1]}});
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (d + column + i < dim) element[column + i] = sums.values[n][e + i];
        }
      }
    }
  }
}

// Writes the tile's sums for its bands to `partial`, (bands, count, dim): what band p receives from
// band q lies in slot q.
template <SteinKernel kernel, int size>
__device__ inline void small_phi(const SvgdUpdate& update, const SmallTile& tile,
                                 const SmallDistances<size>& distances, float bandwidth,
                                 float* partial, SmallPhiShared<size>& shared) {
  const int count = static_cast<int>(update.particles.count);
  const int dim = static_cast<int>(update.particles.dim);
  const KernelScale<float> scale(kernel, bandwidth, static_cast<float>(update.repulsion));
  SmallSources<size> sources;
  // On its way while the weights are formed, where that spills no registers. H200, 2048 x 64: late
  // loads 0.5 us faster.
  constexpr bool early = size < 8;
  if constexpr (early) sources.load(update, tile, 0);
  const bool highest = update.precision == Precision::highest;
  if (highest) {
    store_small_weights<kernel, true>(distances, scale, shared);
  } else {
    store_small_weights<kernel, false>(distances, scale, shared);
  }
  if constexpr (!early) sources.load(update, tile, 0);
  const int half = SmallShare<size>::half();
  const int64_t slot = tile.band((tile.paired ? half : 1 - half) != 0);
  const int first_row = tile.band(half != 0) * SmallShape<size>::edge;
  float* rows = partial + (slot * count + first_row) * dim;
  SmallSums<size> sums;
  bool totals_due = true;
  for (int d = 0; d < dim; d += kDimBlock) {
    const auto load_next = [&] {
      if (early && d + kDimBlock < dim) sources.load(update, tile, d + kDimBlock);
    };
    sources.centre(update.particles, tile, d, shared.largest);
    __syncthreads();
    float largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned bits = 0;
#pragma unroll
      for (int warp = 0; warp < SmallPhiShared<size>::warps; ++warp) {
        bits = max(bits, shared.largest[i][warp]);
      }
      largest[i] = __uint_as_float(bits);
    }
    const float strength = fabsf(scale.repulsion);
    const bool centred = !highest && strength * largest[0] * largest[0] <= kMaxCentred &&
                         largest[1] + strength * largest[0] <= kMaxValue;
    if (centred) {
      multiply_centred<kernel>(sources, tile.paired, scale.repulsion, largest, totals_due, shared,
                               sums, load_next);
      totals_due = false;
    } else {
      sources.load(update, tile, d);
      multiply_direct<kernel>(sources, tile.paired, scale.repulsion, shared, sums);
      load_next();
    }
    store_sums(sums, rows, count - first_row, dim, d);
    if (!early && d + kDimBlock < dim) sources.load(update, tile, d + kDimBlock);
  }
}

}  // namespace fused_ops
