// SPDX-License-Identifier: BSD-3-Clause
// The CPU kernels of SVGD on raw pointers, in pieces that threads may share.
//
// Work is cut into blocks of kRowBlock particles i, whatever the number of threads, so that results
// do not depend on it. The kernels read copies in the accumulation type T (float or double).

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "svgd/svgd.h"

namespace fused_ops {

constexpr int kRowBlock = 4;
template <typename T>
constexpr int kSvgdLanes = 128 / sizeof(T);  // two AVX-512 registers

inline int64_t svgd_row_blocks(int64_t count) { return (count + kRowBlock - 1) / kRowBlock; }

template <typename T>
int64_t svgd_padded(int64_t count) {
  return (count + kSvgdLanes<T> - 1) / kSvgdLanes<T> * kSvgdLanes<T>;
}

// A matrix (count, dim) in panels of kSvgdLanes rows, each of them transposed, so that what is used
// together lies together; columns past count are zero. Panels are an odd number of cache lines
// apart, or else the same dimension of all of them would fall on one set of the cache.
template <typename T>
struct SvgdPanels {
  int64_t dim;
  T* data;

  static int64_t stride(int64_t dim) { return dim * kSvgdLanes<T> + 64 / sizeof(T); }
  static int64_t size(int64_t count, int64_t dim) {
    return svgd_padded<T>(count) / kSvgdLanes<T> * stride(dim);
  }
  // Dimension k of row i; those of the rows after it in its panel follow.
  T* at(int64_t k, int64_t i) const {
    return data + i / kSvgdLanes<T> * stride(dim) + k * kSvgdLanes<T> + i % kSvgdLanes<T>;
  }
};

// Fills panels from (count, dim) rows `stride` elements apart.
template <typename T>
void svgd_transpose(ScalarType type, const void* rows, int64_t stride, int64_t count,
                    const SvgdPanels<T>& panels);

template <typename T>
struct SvgdCpuParticles {
  int64_t count;
  int64_t padded;
  int64_t dim;
  SvgdPanels<T> panels;
  const T* distances;  // (count, padded) filled by svgd_store_distances, or null: then computed
};

// The rows of a (count, padded) matrix of squared distances that row blocks [begin, end) hold.
template <typename T>
void svgd_store_distances(const SvgdCpuParticles<T>& particles, T* distances, int64_t begin,
                          int64_t end);

// The radix select of the median; svgd_median_kernel.cuh describes it.
// Wide digits save a pass where each computes the distances anew, narrow ones the clearing of bins
// where they are stored.
inline int svgd_digit_bits(int64_t count) { return count <= kMaxStoredParticles ? 11 : 16; }
template <typename T>
int svgd_digits(int bits) {
  return (static_cast<int>(sizeof(T)) * 8 - 1 + bits - 1) / bits;
}

struct DigitCounts {
  explicit DigitCounts(int digit_bits) : bits(digit_bits), bins(int64_t{1} << digit_bits) {}

  int bits;
  std::vector<int64_t> bins;
  bool nan = false;

  void merge(const DigitCounts& other) {
    for (std::size_t bin = 0; bin < bins.size(); ++bin) bins[bin] += other.bins[bin];
    nan |= other.nan;
  }
};

// Counts the pairs i < j of row blocks [begin, end) whose leading digits are `prefix`, by digit
// `digit`. The first digit also leaves the sum of each block's distances in `block_sums`.
template <typename T>
void svgd_count(const SvgdCpuParticles<T>& particles, int digit, uint64_t prefix, int64_t begin,
                int64_t end, DigitCounts& counts, double* block_sums);

// The bin of `counts` that holds `rank`, which becomes the rank within the bin.
uint64_t svgd_find_bin(const DigitCounts& counts, int64_t& rank);

// A prefix with one more digit of `bits`; all digits make the value.
template <typename T>
uint64_t svgd_append_digit(uint64_t prefix, int bits, int digit, uint64_t bin);
template <typename T>
T svgd_value(uint64_t key);

// The smallest distance of a pair i < j in row blocks [begin, end) that is above `value`, or inf.
template <typename T>
T svgd_next_above(const SvgdCpuParticles<T>& particles, T value, int64_t begin, int64_t end);

// What the weights multiply, in panels as the particles are: the score, or where there is a mean m
// the values s_j - c (x_j - m) of `may_centre`, which save the difference for each pair.
template <typename T>
struct SvgdCpuSource {
  SvgdPanels<T> values;
  const T* mean;  // (dim), or null
};

// Turns a score into values where that loses nothing, and then fills `mean`.
template <typename T>
bool svgd_centre(const SvgdUpdate& update, const SvgdCpuParticles<T>& particles, T bandwidth,
                 const SvgdPanels<T>& score, T* mean);

// Of the rows that `update` wants, the results of those in row blocks [begin, end).
template <typename T>
void svgd_update_rows(const SvgdUpdate& update, const SvgdCpuParticles<T>& particles,
                      const SvgdCpuSource<T>& source, T bandwidth, int64_t begin, int64_t end);

}  // namespace fused_ops
