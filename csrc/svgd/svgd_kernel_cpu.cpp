// SPDX-License-Identifier: BSD-3-Clause
// CPU kernels of SVGD: panels of particles, weights and the update.

#include <bit>
#include <cmath>
#include <vector>

#include "common/cpu_scalar.h"
#include "svgd/svgd_distances_cpu.h"
#include "svgd/svgd_formula.h"

namespace fused_ops {
namespace {

// e^x for x <= 0, within 2 units in the last place; 0 below the smallest normal result. Unlike a
// library's, it is compiled into loops.
template <typename T>
FUSED_OPS_INLINE T exp_nonpositive(T x) {
  constexpr bool narrow = sizeof(T) == 4;
  constexpr int mantissa = narrow ? 23 : 52;
  constexpr T round = narrow ? T(12582912.0) : T(6755399441055744.0);  // 1.5 * 2^mantissa
  constexpr T ln2_high = narrow ? T(0.693359375) : T(6.93147180369123816490e-01);
  constexpr T ln2_low = narrow ? T(-2.12194440e-4) : T(1.90821492927058770002e-10);
  constexpr T lowest = narrow ? T(-87.3) : T(-708.3);
  const T clamped = x < lowest ? lowest : x;
  const T shifted = clamped * T(1.44269504088896340736) + round;
  const T n = shifted - round;
  const T r = (clamped - n * ln2_high) - n * ln2_low;
  // Taylor: |r| <= ln(2)/2, where the first term left out is below half a unit.
  constexpr int degree = narrow ? 7 : 13;
  constexpr double inverse_factorials[] = {1.0,
                                           1.0,
                                           1.0 / 2,
                                           1.0 / 6,
                                           1.0 / 24,
                                           1.0 / 120,
                                           1.0 / 720,
                                           1.0 / 5040,
                                           1.0 / 40320,
                                           1.0 / 362880,
                                           1.0 / 3628800,
                                           1.0 / 39916800,
                                           1.0 / 479001600,
                                           1.0 / 6227020800.0};
  T sum = static_cast<T>(inverse_factorials[degree]);
  for (int term = degree - 1; term >= 0; --term) {
    sum = sum * r + static_cast<T>(inverse_factorials[term]);
  }
  const Key<T> exponent = std::bit_cast<Key<T>>(shifted) << mantissa;
  const T result = std::bit_cast<T>(std::bit_cast<Key<T>>(sum) + exponent);
  return x != x ? x : x < lowest ? T(0) : result;
}

// Turns distances into K_ij and G_ij (what multiplies x_i - x_j), zero past `inside` columns.
template <SteinKernel kernel, typename T>
void weights_of(const KernelScale<T>& scale, int64_t columns, int64_t inside,
                T (&distances)[kRowBlock][kColumnBlock], T (&repulsion)[kRowBlock][kColumnBlock]) {
  with_vectors([&](auto) FUSED_OPS_INLINE_LAMBDA {
    for (int r = 0; r < kRowBlock; ++r) {
      for (int64_t j = 0; j < columns; ++j) {
        const T u = distances[r][j] * scale.half_inverse;
        T k, g;
        if constexpr (kernel == SteinKernel::rbf) {
          k = exp_nonpositive(-u);
          g = k * scale.repulsion;
        } else {
          k = T(1) / std::sqrt(T(1) + u);
          g = k * k * k * scale.repulsion;
        }
        distances[r][j] = j < inside ? k : T(0);
        repulsion[r][j] = j < inside ? g : T(0);
      }
    }
  });
}

template <typename T, int bytes>
FUSED_OPS_INLINE T sum_of(const Lanes<T, bytes>& lanes) {
  T sum = 0;
  for (int lane = 0; lane < kLanes<T, bytes>; ++lane) sum += lanes[lane];
  return sum;
}

// Adds sum_j K_ij * score_j + G_ij * (x_i - x_j) over a block of columns to each (row, dimension).
template <typename T>
void apply_weights(const SvgdCpuParticles<T>& particles, const SvgdPanels<T>& score, int64_t i,
                   int64_t j, int64_t columns, const T (&weights)[kRowBlock][kColumnBlock],
                   const T (&repulsion)[kRowBlock][kColumnBlock], T* sums) {
  with_vectors([&](auto vector_bytes) FUSED_OPS_INLINE_LAMBDA {
    constexpr int bytes = vector_bytes;
    for (int64_t k = 0; k < particles.dim; ++k) {
      const T* x_i = particles.panels.at(k, i);
      Lanes<T, bytes> lane_sums[kRowBlock] = {};
      for (int64_t first = 0; first < columns; first += kLanes<T, bytes>) {
        const auto x_j = load_lanes<bytes>(particles.panels.at(k, j + first));
        const auto s_j = load_lanes<bytes>(score.at(k, j + first));
        for (int r = 0; r < kRowBlock; ++r) {
          lane_sums[r] += load_lanes<bytes>(weights[r] + first) * s_j;
          lane_sums[r] += load_lanes<bytes>(repulsion[r] + first) * (x_i[r] - x_j);
        }
      }
      for (int r = 0; r < kRowBlock; ++r) {
        sums[r * particles.dim + k] += sum_of<T, bytes>(lane_sums[r]);
      }
    }
  });
}

// Adds sum_j K_ij * value_j over a block of columns to `dims` dimensions from k on of each row.
template <int bytes, int dims, typename T>
FUSED_OPS_INLINE void add_products(const SvgdPanels<T>& values, int64_t k, int64_t j,
                                   int64_t columns, const T (&weights)[kRowBlock][kColumnBlock],
                                   T* sums) {
  Lanes<T, bytes> lane_sums[dims][kRowBlock] = {};
  for (int64_t first = 0; first < columns; first += kLanes<T, bytes>) {
    Lanes<T, bytes> value[dims];
    for (int d = 0; d < dims; ++d) value[d] = load_lanes<bytes>(values.at(k + d, j + first));
    for (int r = 0; r < kRowBlock; ++r) {
      const auto weight = load_lanes<bytes>(weights[r] + first);
      for (int d = 0; d < dims; ++d) lane_sums[d][r] += weight * value[d];
    }
  }
  for (int r = 0; r < kRowBlock; ++r) {
    for (int d = 0; d < dims; ++d) {
      sums[r * values.dim + k + d] += sum_of<T, bytes>(lane_sums[d][r]);
    }
  }
}

// The same for all dimensions, and sum_j K_ij.
template <typename T>
void apply_products(const SvgdPanels<T>& values, int64_t j, int64_t columns,
                    const T (&weights)[kRowBlock][kColumnBlock], T* sums,
                    T (&weight_sums)[kRowBlock]) {
  with_vectors([&](auto vector_bytes) FUSED_OPS_INLINE_LAMBDA {
    constexpr int bytes = vector_bytes;
    constexpr int together = bytes == 64 ? 4 : 2;  // dimensions that a weight once loaded serves
    int64_t k = 0;
    for (; k + together <= values.dim; k += together) {
      add_products<bytes, together>(values, k, j, columns, weights, sums);
    }
    for (; k < values.dim; ++k) add_products<bytes, 1>(values, k, j, columns, weights, sums);
    for (int r = 0; r < kRowBlock; ++r) {
      Lanes<T, bytes> lane_sums = {};
      for (int64_t first = 0; first < columns; first += kLanes<T, bytes>) {
        lane_sums += load_lanes<bytes>(weights[r] + first);
      }
      weight_sums[r] += sum_of<T, bytes>(lane_sums);
    }
  });
}

template <typename scalar, typename T>
void store_rows(const SvgdUpdate& update, const SvgdCpuParticles<T>& particles, int64_t i,
                const T* sums) {
  const int64_t begin = std::max<int64_t>(0, update.first_row - i);
  const int64_t end = std::min<int64_t>(kRowBlock, update.first_row + update.rows - i);
  for (int64_t r = begin; r < end; ++r) {
    scalar* result =
        static_cast<scalar*>(update.result) + (i + r - update.first_row) * particles.dim;
    for (int64_t k = 0; k < particles.dim; ++k) {
      T value = sums[r * particles.dim + k] / static_cast<T>(particles.count);
      if (update.step) {
        value = particles.panels.at(k, i)[r] + static_cast<T>(update.step_size) * value;
      }
      result[k] = static_cast<scalar>(value);
    }
  }
}

}  // namespace

template <typename T>
void svgd_transpose(ScalarType type, const void* rows, int64_t stride, int64_t count,
                    const SvgdPanels<T>& panels) {
  dispatch_scalar(type, [&](auto* pointer) {
    const auto* source = static_cast<const std::remove_pointer_t<decltype(pointer)>*>(rows);
    for (int64_t first = 0; first < svgd_padded<T>(count); first += kSvgdLanes<T>) {
      for (int64_t k = 0; k < panels.dim; ++k) {
        T* lanes = panels.at(k, first);
        for (int64_t i = 0; i < kSvgdLanes<T>; ++i) {
          lanes[i] = first + i < count ? static_cast<T>(source[(first + i) * stride + k]) : T(0);
        }
      }
    }
  });
}

template <typename T>
void svgd_store_distances(const SvgdCpuParticles<T>& particles, T* distances, int64_t begin,
                          int64_t end) {
  alignas(64) T block[kRowBlock][kColumnBlock];
  for (int64_t i = begin * kRowBlock; i < std::min(end * kRowBlock, particles.count);
       i += kRowBlock) {
    for (int64_t j = 0; j < particles.padded; j += kColumnBlock) {
      const int64_t columns = std::min(kColumnBlock, particles.padded - j);
      block_distances(particles, i, j, columns, block);
      for (int64_t r = 0; r < std::min<int64_t>(kRowBlock, particles.count - i); ++r) {
        std::copy(block[r], block[r] + columns, distances + (i + r) * particles.padded + j);
      }
    }
  }
}

template <typename T>
bool svgd_centre(const SvgdUpdate& update, const SvgdCpuParticles<T>& particles, T bandwidth,
                 const SvgdPanels<T>& score, T* mean) {
  // In few dimensions phi is a small difference of large sums, which wants all digits of
  // differences, and a pair's exponential takes most of the time.
  constexpr int64_t least_dim = 4;
  if (update.kernel != SteinKernel::rbf || particles.dim < least_dim) return false;
  std::vector<T> norms(particles.count);
  for (int64_t k = 0; k < particles.dim; ++k) {
    double sum = 0;
    for (int64_t j = 0; j < particles.count; ++j) sum += *particles.panels.at(k, j);
    mean[k] = static_cast<T>(sum / static_cast<double>(particles.count));
    for (int64_t j = 0; j < particles.count; ++j) {
      const T offset = *particles.panels.at(k, j) - mean[k];
      norms[j] += offset * offset;
    }
  }
  for (int64_t j = 0; j < particles.count; ++j) {
    if (!may_centre(norms[j], bandwidth)) return false;  // also where it is NaN
  }
  const KernelScale<T> scale(update.kernel, bandwidth, static_cast<T>(update.repulsion));
  for (int64_t k = 0; k < particles.dim; ++k) {
    for (int64_t j = 0; j < particles.count; ++j) {
      *score.at(k, j) -= scale.repulsion * (*particles.panels.at(k, j) - mean[k]);
    }
  }
  return true;
}

template <typename T>
void svgd_update_rows(const SvgdUpdate& update, const SvgdCpuParticles<T>& particles,
                      const SvgdCpuSource<T>& source, T bandwidth, int64_t begin, int64_t end) {
  alignas(64) T distances[kRowBlock][kColumnBlock];
  alignas(64) T repulsion[kRowBlock][kColumnBlock];
  const KernelScale<T> scale(update.kernel, bandwidth, static_cast<T>(update.repulsion));
  std::vector<T> sums(kRowBlock * particles.dim);
  for (int64_t block = begin; block < end; ++block) {
    const int64_t i = block * kRowBlock;
    std::fill(sums.begin(), sums.end(), T(0));
    T weight_sums[kRowBlock] = {};
    for (int64_t j = 0; j < particles.padded; j += kColumnBlock) {
      const int64_t columns = std::min(kColumnBlock, particles.padded - j);
      get_distances(particles, i, j, columns, distances);
      if (update.kernel == SteinKernel::rbf) {
        weights_of<SteinKernel::rbf>(scale, columns, particles.count - j, distances, repulsion);
      } else {
        weights_of<SteinKernel::imq>(scale, columns, particles.count - j, distances, repulsion);
      }
      if (source.mean != nullptr) {
        apply_products(source.values, j, columns, distances, sums.data(), weight_sums);
      } else {
        apply_weights(particles, source.values, i, j, columns, distances, repulsion, sums.data());
      }
    }
    for (int64_t r = 0; source.mean != nullptr && r < kRowBlock; ++r) {
      for (int64_t k = 0; k < particles.dim; ++k) {
        const T x = particles.panels.at(k, i)[r];
        sums[r * particles.dim + k] += scale.repulsion * (x - source.mean[k]) * weight_sums[r];
      }
    }
    dispatch_scalar(update.particles.type, [&](auto* pointer) {
      store_rows<std::remove_pointer_t<decltype(pointer)>>(update, particles, i, sums.data());
    });
  }
}

#define FUSED_OPS_SVGD_CPU(T)                                                              \
  template void svgd_transpose<T>(ScalarType, const void*, int64_t, int64_t,               \
                                  const SvgdPanels<T>&);                                   \
  template void svgd_store_distances<T>(const SvgdCpuParticles<T>&, T*, int64_t, int64_t); \
  template bool svgd_centre<T>(const SvgdUpdate&, const SvgdCpuParticles<T>&, T,           \
                               const SvgdPanels<T>&, T*);                                  \
  template void svgd_update_rows<T>(const SvgdUpdate&, const SvgdCpuParticles<T>&,         \
                                    const SvgdCpuSource<T>&, T, int64_t, int64_t);
FUSED_OPS_SVGD_CPU(float)
FUSED_OPS_SVGD_CPU(double)
#undef FUSED_OPS_SVGD_CPU

}  // namespace fused_ops
