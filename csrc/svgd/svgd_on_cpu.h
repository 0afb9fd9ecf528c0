// SPDX-License-Identifier: BSD-3-Clause
// SVGD on the CPU: memory for the kernels, and row blocks shared out among torch's threads.

#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "common/cpu_memory.h"
#include "common/cpu_parallel.h"
#include "svgd/svgd_formula.h"
#include "svgd/svgd_kernel_cpu.h"

namespace fused_ops {

// Pairs times dimensions.
constexpr int64_t kWorkPerThread = 1 << 17;

// The median as far as its digits are settled.
template <typename T>
struct SvgdSearch {
  SvgdSearch(BandwidthRule rule, int64_t count)
      : rule(rule), count(count), ranks(median_ranks(rule, count)), rank(sought_rank(ranks)) {}

  void settle(int digit, const DigitCounts& counts) {
    const uint64_t bin = svgd_find_bin(counts, rank);
    key = svgd_append_digit<T>(key, counts.bits, digit, bin);
    equal = counts.bins[bin];
    nan |= counts.nan;
  }
  T value() const { return svgd_value<T>(key); }
  // Whether the next distance above the value is the upper one of two in the middle.
  bool wants_next() const { return mean_of_two(ranks) && rank + 1 >= equal; }
  T bandwidth(T next) const {
    T lower = ranks.lower < 0 ? T(0) : value();
    T upper = ranks.upper < 0 ? T(0) : wants_next() ? next : value();
    if (nan) lower = upper = std::numeric_limits<T>::quiet_NaN();
    const double pairs = static_cast<double>(count) * static_cast<double>(count - 1) / 2;
    return bandwidth_of<T>(rule, count, lower, upper, count > 1 ? sum / pairs : 0);
  }

  BandwidthRule rule;
  int64_t count;
  MedianRanks ranks;
  int64_t rank;  // among the pairs whose leading digits are `key`
  uint64_t key = 0;
  int64_t equal = 0;
  double sum = 0;  // of all distances
  bool nan = false;
};

template <typename T>
class SvgdOnCpu {
 public:
  // `store` is whether few particles' distances are kept, for several passes over all of them.
  SvgdOnCpu(const SvgdParticles& source, bool store)
      : panels_(cpu_memory<T>(SvgdPanels<T>::size(source.count, source.dim))),
        particles_{source.count,
                   svgd_padded<T>(source.count),
                   source.dim,
                   {source.dim, panels_.get()},
                   nullptr} {
    svgd_transpose(source.type, source.data, source.stride, source.count, particles_.panels);
    if (store && source.count <= kMaxStoredParticles) {
      distances_ = cpu_memory<T>(source.count * particles_.padded);
      for_row_blocks([&](int64_t begin, int64_t end) {
        svgd_store_distances(particles_, distances_.get(), begin, end);
      });
      particles_.distances = distances_.get();
    }
  }

  T bandwidth(BandwidthRule rule) {
    const int64_t count = particles_.count;
    const int bits = svgd_digit_bits(count);
    std::vector<double> block_sums(svgd_row_blocks(count));
    SvgdSearch<T> search(rule, count);
    for (int digit = 0; digit < svgd_digits<T>(bits); ++digit) {
      search.settle(digit, count_digit(digit, bits, search.key, {}, block_sums));
    }
    for (const double part : block_sums) search.sum += part;
    return search.bandwidth(search.wants_next() ? next_above(search.value(), {}) : T(0));
  }

  // Of a share of the pairs: a histogram of one digit, and for the first the sum of each row
  // block's distances.
  DigitCounts count_digit(int digit, int bits, uint64_t key, const PairShare& share,
                          std::vector<double>& block_sums) {
    DigitCounts counts(bits);
    std::mutex mutex;
    for_triangle(share, [&](int64_t begin, int64_t end) {
      DigitCounts own(bits);
      both_ends(begin, end, [&](int64_t first, int64_t last) {
        svgd_count(particles_, digit, key, first, last, own, block_sums.data());
      });
      const std::lock_guard<std::mutex> lock(mutex);
      counts.merge(own);
    });
    return counts;
  }

  // The smallest distance of a share of the pairs that is above `value`, or inf.
  T next_above(T value, const PairShare& share) {
    T next = std::numeric_limits<T>::infinity();
    std::mutex mutex;
    for_triangle(share, [&](int64_t begin, int64_t end) {
      both_ends(begin, end, [&](int64_t first, int64_t last) {
        const T own = svgd_next_above(particles_, value, first, last);
        const std::lock_guard<std::mutex> lock(mutex);
        next = std::min(next, own);
      });
    });
    return next;
  }

  void update(const SvgdUpdate& update, T bandwidth) {
    const auto memory = cpu_memory<T>(SvgdPanels<T>::size(particles_.count, particles_.dim));
    const SvgdPanels<T> score{particles_.dim, memory.get()};
    svgd_transpose(update.particles.type, update.score, update.score_stride, particles_.count,
                   score);
    std::vector<T> mean(particles_.dim);
    const bool centred = svgd_centre(update, particles_, bandwidth, score, mean.data());
    const SvgdCpuSource<T> source{score, centred ? mean.data() : nullptr};
    const int64_t first = update.first_row / kRowBlock;
    parallel(svgd_row_blocks(update.first_row + update.rows) - first, row_block_work(),
             [&](int64_t begin, int64_t end) {
               svgd_update_rows(update, particles_, source, bandwidth, first + begin, first + end);
             });
  }

  void copy_distances(T* result) {
    const int64_t padded = particles_.padded;
    if (distances_ == nullptr) {
      distances_ = cpu_memory<T>(particles_.count * padded);
      svgd_store_distances(particles_, distances_.get(), 0, svgd_row_blocks(particles_.count));
    }
    for (int64_t i = 0; i < particles_.count; ++i) {
      const T* row = distances_.get() + i * padded;
      std::copy(row, row + particles_.count, result + i * particles_.count);
    }
  }

 private:
  template <typename Function>
  void parallel(int64_t items, int64_t work_per_item, const Function& function) {
    parallel_for_items(items, work_per_item, kWorkPerThread, function);
  }

  template <typename Function>
  void for_row_blocks(const Function& function) {
    parallel(svgd_row_blocks(particles_.count), row_block_work(), function);
  }

  int64_t row_block_work() const { return kRowBlock * particles_.count * particles_.dim; }

  // Row blocks of the pairs i < j shrink towards the end, so each item is one from either end.
  template <typename Function>
  void for_triangle(const PairShare& share, const Function& function) {
    const int64_t work = particles_.distances ? 1 : particles_.dim;
    const int64_t items = (svgd_row_blocks(particles_.count) + 1) / 2;
    const int64_t first = items * share.index / share.count;
    const int64_t last = items * (share.index + 1) / share.count;
    parallel(last - first, kRowBlock * particles_.count * work,
             [&](int64_t begin, int64_t end) { function(first + begin, first + end); });
  }

  template <typename Function>
  void both_ends(int64_t begin, int64_t end, const Function& function) {
    const int64_t blocks = svgd_row_blocks(particles_.count);
    function(begin, end);
    function(std::max(blocks - end, end), blocks - begin);
  }

  std::unique_ptr<T[]> panels_;
  std::unique_ptr<T[]> distances_;
  SvgdCpuParticles<T> particles_;
};

// Calls `function` with an SvgdOnCpu of the accumulation type.
template <typename Function>
void with_svgd(const SvgdParticles& particles, bool store, const Function& function) {
  if (particles.type == ScalarType::float64) {
    SvgdOnCpu<double> svgd(particles, store);
    function(svgd, double{});
  } else {
    SvgdOnCpu<float> svgd(particles, store);
    function(svgd, float{});
  }
}

}  // namespace fused_ops
