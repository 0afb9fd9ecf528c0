// SPDX-License-Identifier: BSD-3-Clause
// CPU kernels of SVGD.
//
// Inner loops run over a fixed number of lanes (neighbouring particles j) with no floating-point
// contraction, so every instruction set that FUSED_OPS_CLONES builds them for gives the same bits.

#include "svgd/svgd_kernel_cpu.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/clones.h"
#include "common/cpu_scalar.h"
#include "svgd/svgd_formula.h"

namespace fused_ops {
namespace {

constexpr int64_t kColumnBlock = 512;  // particles j whose weights are in cache at a time

template <typename T>
using Key = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

// Of functions that return lanes, which are all inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

// Neighbouring particles j in a register, or in the two or four that other instruction sets have.
template <typename T>
struct LanesOf {
  typedef T type __attribute__((vector_size(64)));
};
template <typename T>
using Lanes = typename LanesOf<T>::type;
template <typename T>
constexpr int kLanes = sizeof(Lanes<T>) / sizeof(T);

template <typename T>
FUSED_OPS_INLINE Lanes<T> load_lanes(const T* address) {
  Lanes<T> lanes;
  std::memcpy(&lanes, address, sizeof(lanes));
  return lanes;
}

template <typename T>
FUSED_OPS_INLINE T sum_of(const Lanes<T>& lanes) {
  T sum = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) sum += lanes[lane];
  return sum;
}

// Distances of particles [i, i + kRowBlock) from [j, j + columns), a multiple of the lanes.
template <typename T>
FUSED_OPS_CLONES void block_distances(const SvgdCpuParticles<T>& particles, int64_t i, int64_t j,
                                      int64_t columns, T (&distances)[kRowBlock][kColumnBlock]) {
  for (int64_t first = 0; first < columns; first += kLanes<T>) {
    Lanes<T> total[kRowBlock] = {};
    for (int64_t block = 0; block < particles.dim; block += kDimBlock) {
      Lanes<T> sums[kRowBlock] = {};
      const int64_t end = std::min(block + kDimBlock, particles.dim);
      for (int64_t k = block; k < end; ++k) {
        const T* x_i = particles.panels.at(k, i);
        const Lanes<T> x_j = load_lanes(particles.panels.at(k, j + first));
        for (int r = 0; r < kRowBlock; ++r) {
          const Lanes<T> difference = x_i[r] - x_j;
          sums[r] += difference * difference;
        }
      }
      for (int r = 0; r < kRowBlock; ++r) total[r] += sums[r];
    }
    for (int r = 0; r < kRowBlock; ++r) {
      std::memcpy(distances[r] + first, &total[r], sizeof(total[r]));
    }
  }
}

// As block_distances, from the stored matrix where there is one.
template <typename T>
void get_distances(const SvgdCpuParticles<T>& particles, int64_t i, int64_t j, int64_t columns,
                   T (&distances)[kRowBlock][kColumnBlock]) {
  if (particles.distances == nullptr) {
    return block_distances(particles, i, j, columns, distances);
  }
  for (int64_t r = 0; r < std::min<int64_t>(kRowBlock, particles.count - i); ++r) {
    const T* row = particles.distances + (i + r) * particles.padded + j;
    std::copy(row, row + columns, distances[r]);
  }
}

// Calls `visit(d2, count)` for runs of the pairs i < j whose i is in a row block.
template <typename T, typename Visit>
void for_each_run(const SvgdCpuParticles<T>& particles, int64_t block, const Visit& visit) {
  alignas(64) T distances[kRowBlock][kColumnBlock];
  const int64_t i = block * kRowBlock;
  const int64_t rows = std::min<int64_t>(kRowBlock, particles.count - i);
  for (int64_t j = i / kSvgdLanes<T> * kSvgdLanes<T>; j < particles.count; j += kColumnBlock) {
    const int64_t columns = std::min(kColumnBlock, particles.padded - j);
    get_distances(particles, i, j, columns, distances);
    const int64_t end = std::min(j + columns, particles.count);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t first = std::max(j, i + r + 1);
      if (first < end) visit(distances[r] + (first - j), end - first);
    }
  }
}

// The sum of a run, NaN where one of its distances is.
template <typename T>
FUSED_OPS_CLONES double run_sum(const T* distances, int64_t count) {
  double sums[16] = {};
  int64_t first = 0;
  for (; first + 16 <= count; first += 16) {
    for (int lane = 0; lane < 16; ++lane) sums[lane] += distances[first + lane];
  }
  for (int lane = 0; lane < count - first; ++lane) sums[lane] += distances[first + lane];
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

// The bits below the sign are cut into digits from the top; the last one may be shorter.
template <typename T>
int digit_bits(int bits, int digit) {
  return std::min(bits, static_cast<int>(sizeof(T)) * 8 - 1 - bits * digit);
}

template <typename T>
int digit_shift(int bits, int digit) {
  return std::max(0, static_cast<int>(sizeof(T)) * 8 - 1 - bits * (digit + 1));
}

// e^x for x <= 0, within 2 units in the last place; 0 below the smallest normal result. The same
// bits on every instruction set, which a library's exp does not promise.
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
FUSED_OPS_CLONES void weights_of(const KernelScale<T>& scale, int64_t columns, int64_t inside,
                                 T (&distances)[kRowBlock][kColumnBlock],
                                 T (&repulsion)[kRowBlock][kColumnBlock]) {
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
}

// Adds sum_j K_ij * score_j + G_ij * (x_i - x_j) over a block of columns to each (row, dimension).
template <typename T>
FUSED_OPS_CLONES void apply_weights(const SvgdCpuParticles<T>& particles,
                                    const SvgdPanels<T>& score, int64_t i, int64_t j,
                                    int64_t columns, const T (&weights)[kRowBlock][kColumnBlock],
                                    const T (&repulsion)[kRowBlock][kColumnBlock], T* sums) {
  for (int64_t k = 0; k < particles.dim; ++k) {
    const T* x_i = particles.panels.at(k, i);
    Lanes<T> lane_sums[kRowBlock] = {};
    for (int64_t first = 0; first < columns; first += kLanes<T>) {
      const Lanes<T> x_j = load_lanes(particles.panels.at(k, j + first));
      const Lanes<T> s_j = load_lanes(score.at(k, j + first));
      for (int r = 0; r < kRowBlock; ++r) {
        lane_sums[r] += load_lanes(weights[r] + first) * s_j +
                        load_lanes(repulsion[r] + first) * (x_i[r] - x_j);
      }
    }
    for (int r = 0; r < kRowBlock; ++r) sums[r * particles.dim + k] += sum_of<T>(lane_sums[r]);
  }
}

// Adds sum_j K_ij * value_j over a block of columns to `dims` dimensions from k on of each row.
template <int dims, typename T>
FUSED_OPS_INLINE void add_products(const SvgdPanels<T>& values, int64_t k, int64_t j,
                                   int64_t columns, const T (&weights)[kRowBlock][kColumnBlock],
                                   T* sums) {
  Lanes<T> lane_sums[dims][kRowBlock] = {};
  for (int64_t first = 0; first < columns; first += kLanes<T>) {
    Lanes<T> value[dims];
    for (int d = 0; d < dims; ++d) {
      value[d] = load_lanes(values.at(k + d, j + first));
    }
    for (int r = 0; r < kRowBlock; ++r) {
      const Lanes<T> weight = load_lanes(weights[r] + first);
      for (int d = 0; d < dims; ++d) lane_sums[d][r] += weight * value[d];
    }
  }
  for (int r = 0; r < kRowBlock; ++r) {
    for (int d = 0; d < dims; ++d) sums[r * values.dim + k + d] += sum_of<T>(lane_sums[d][r]);
  }
}

// The same for all dimensions, and sum_j K_ij.
template <typename T>
FUSED_OPS_CLONES void apply_products(const SvgdPanels<T>& values, int64_t j, int64_t columns,
                                     const T (&weights)[kRowBlock][kColumnBlock], T* sums,
                                     T (&weight_sums)[kRowBlock]) {
  constexpr int together = 2;  // the weights' loads serve both
  int64_t k = 0;
  for (; k + together <= values.dim; k += together) {
    add_products<together>(values, k, j, columns, weights, sums);
  }
  if (k < values.dim) add_products<1>(values, k, j, columns, weights, sums);
  for (int r = 0; r < kRowBlock; ++r) {
    Lanes<T> lane_sums = {};
    for (int64_t first = 0; first < columns; first += kLanes<T>) {
      lane_sums += load_lanes(weights[r] + first);
    }
    weight_sums[r] += sum_of<T>(lane_sums);
  }
}

template <typename scalar, typename T>
void store_rows(const SvgdUpdate& update, const SvgdCpuParticles<T>& particles, int64_t i,
                const T* sums) {
  for (int64_t r = 0; r < std::min<int64_t>(kRowBlock, particles.count - i); ++r) {
    scalar* result = static_cast<scalar*>(update.result) + (i + r) * particles.dim;
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
void svgd_count(const SvgdCpuParticles<T>& particles, int digit, uint64_t prefix, int64_t begin,
                int64_t end, DigitCounts& counts, double* block_sums) {
  const int bits = digit_bits<T>(counts.bits, digit);
  const int shift = digit_shift<T>(counts.bits, digit);
  const Key<T> mask = (Key<T>(1) << bits) - 1;
  // Neighbours often share a bin, and two counters let their increments overlap.
  std::vector<int64_t> odd(counts.bins.size());
  int64_t* const bins[2] = {counts.bins.data(), odd.data()};
  for (int64_t block = begin; block < end; ++block) {
    double sum = 0;
    for_each_run(particles, block, [&](const T* distances, int64_t count) {
      if (digit == 0) sum += run_sum(distances, count);
      for (int64_t pair = 0; pair < count; ++pair) {
        const Key<T> key = std::bit_cast<Key<T>>(distances[pair]) >> shift;
        if ((key >> bits) == prefix) ++bins[pair % 2][key & mask];
      }
    });
    if (digit == 0) {
      counts.nan |= sum != sum;
      block_sums[block] = sum;
    }
  }
  for (size_t bin = 0; bin < odd.size(); ++bin) counts.bins[bin] += odd[bin];
}

uint64_t svgd_find_bin(const DigitCounts& counts, int64_t& rank) {
  // NaN leaves too few pairs for the rank: then any bin does, since the median is NaN.
  uint64_t bin = 0;
  while (bin + 1 < counts.bins.size() && rank >= counts.bins[bin]) rank -= counts.bins[bin++];
  return bin;
}

template <typename T>
uint64_t svgd_append_digit(uint64_t prefix, int bits, int digit, uint64_t bin) {
  return prefix << digit_bits<T>(bits, digit) | bin;
}

template <typename T>
T svgd_value(uint64_t key) {
  return std::bit_cast<T>(static_cast<Key<T>>(key));
}

template <typename T>
T svgd_next_above(const SvgdCpuParticles<T>& particles, T value, int64_t begin, int64_t end) {
  T next = std::numeric_limits<T>::infinity();
  for (int64_t block = begin; block < end; ++block) {
    for_each_run(particles, block, [&](const T* distances, int64_t count) {
      for (int64_t pair = 0; pair < count; ++pair) {
        if (distances[pair] > value && distances[pair] < next) next = distances[pair];
      }
    });
  }
  return next;
}

template <typename T>
bool svgd_centre(const SvgdUpdate& update, const SvgdCpuParticles<T>& particles, T bandwidth,
                 const SvgdPanels<T>& score, T* mean) {
  if (update.kernel != SteinKernel::rbf) return false;
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
  template void svgd_count<T>(const SvgdCpuParticles<T>&, int, uint64_t, int64_t, int64_t, \
                              DigitCounts&, double*);                                      \
  template uint64_t svgd_append_digit<T>(uint64_t, int, int, uint64_t);                    \
  template T svgd_value<T>(uint64_t);                                                      \
  template T svgd_next_above<T>(const SvgdCpuParticles<T>&, T, int64_t, int64_t);          \
  template bool svgd_centre<T>(const SvgdUpdate&, const SvgdCpuParticles<T>&, T,           \
                               const SvgdPanels<T>&, T*);                                  \
  template void svgd_update_rows<T>(const SvgdUpdate&, const SvgdCpuParticles<T>&,         \
                                    const SvgdCpuSource<T>&, T, int64_t, int64_t);
FUSED_OPS_SVGD_CPU(float)
FUSED_OPS_SVGD_CPU(double)
#undef FUSED_OPS_SVGD_CPU

}  // namespace fused_ops
