// SPDX-License-Identifier: BSD-3-Clause
// CPU kernels of the median of the squared distances.

#include <bit>
#include <limits>

#include "svgd/svgd_distances_cpu.h"

namespace fused_ops {
namespace {

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

}  // namespace

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

#define FUSED_OPS_SVGD_CPU(T)                                                              \
  template void svgd_count<T>(const SvgdCpuParticles<T>&, int, uint64_t, int64_t, int64_t, \
                              DigitCounts&, double*);                                      \
  template uint64_t svgd_append_digit<T>(uint64_t, int, int, uint64_t);                    \
  template T svgd_value<T>(uint64_t);                                                      \
  template T svgd_next_above<T>(const SvgdCpuParticles<T>&, T, int64_t, int64_t);
FUSED_OPS_SVGD_CPU(float)
FUSED_OPS_SVGD_CPU(double)
#undef FUSED_OPS_SVGD_CPU

}  // namespace fused_ops
