// SPDX-License-Identifier: BSD-3-Clause
// The CPU ops: arguments, allocation, and row blocks shared out among torch's threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "svgd/svgd_arguments.h"
#include "svgd/svgd_formula.h"
#include "svgd/svgd_kernel_cpu.h"

namespace fused_ops {
namespace {

// Pairs times dimensions that repay waking a second thread.
constexpr int64_t kWorkPerThread = 1 << 17;

template <typename T>
class SvgdOnCpu {
 public:
  explicit SvgdOnCpu(const SvgdParticles& source)
      : panels_(new T[SvgdPanels<T>::size(source.count, source.dim)]),
        particles_{source.count,
                   svgd_padded<T>(source.count),
                   source.dim,
                   {source.dim, panels_.get()},
                   nullptr} {
    svgd_transpose(source.type, source.data, source.stride, source.count, particles_.panels);
    if (source.count <= kMaxStoredParticles) {
      distances_.reset(new T[source.count * particles_.padded]);
      for_row_blocks([&](int64_t begin, int64_t end) {
        svgd_store_distances(particles_, distances_.get(), begin, end);
      });
      particles_.distances = distances_.get();
    }
  }

  T bandwidth(BandwidthRule rule) {
    const int64_t count = particles_.count;
    const MedianRanks ranks = median_ranks(rule, count);
    std::vector<double> block_sums(svgd_row_blocks(count));
    int64_t rank = std::max<int64_t>(ranks.lower >= 0 ? ranks.lower : ranks.upper, 0);
    uint64_t key = 0;
    int64_t equal = 0;
    bool nan = false;
    const int bits = svgd_digit_bits(count);
    for (int digit = 0; digit < svgd_digits<T>(bits); ++digit) {
      DigitCounts counts(bits);
      std::mutex mutex;
      for_triangle([&](int64_t begin, int64_t end) {
        DigitCounts own(bits);
        const auto count_range = [&](int64_t first, int64_t last) {
          svgd_count(particles_, digit, key, first, last, own, block_sums.data());
        };
        both_ends(begin, end, count_range);
        const std::lock_guard<std::mutex> lock(mutex);
        counts.merge(own);
      });
      const uint64_t bin = svgd_find_bin(counts, rank);
      key = svgd_append_digit<T>(key, bits, digit, bin);
      equal = counts.bins[bin];
      nan |= counts.nan;
    }
    const T value = svgd_value<T>(key);
    T lower = ranks.lower < 0 ? T(0) : value;
    T upper = ranks.upper < 0 ? T(0) : value;
    if (ranks.lower >= 0 && ranks.upper > ranks.lower && rank + 1 >= equal) {
      upper = next_above(value);
    }
    if (nan) lower = upper = std::numeric_limits<T>::quiet_NaN();
    double sum = 0;
    for (const double part : block_sums) sum += part;
    const double pairs = static_cast<double>(count) * static_cast<double>(count - 1) / 2;
    return bandwidth_of<T>(rule, count, lower, upper, count > 1 ? sum / pairs : 0);
  }

  void update(const SvgdUpdate& update, T bandwidth) {
    const std::unique_ptr<T[]> memory(new T[SvgdPanels<T>::size(particles_.count, particles_.dim)]);
    const SvgdPanels<T> score{particles_.dim, memory.get()};
    svgd_transpose(update.particles.type, update.score, update.score_stride, particles_.count,
                   score);
    std::vector<T> mean(particles_.dim);
    const bool centred = svgd_centre(update, particles_, bandwidth, score, mean.data());
    const SvgdCpuSource<T> source{score, centred ? mean.data() : nullptr};
    for_row_blocks([&](int64_t begin, int64_t end) {
      svgd_update_rows(update, particles_, source, bandwidth, begin, end);
    });
  }

  void copy_distances(T* result) {
    const int64_t padded = particles_.padded;
    if (distances_ == nullptr) {
      distances_.reset(new T[particles_.count * padded]);
      svgd_store_distances(particles_, distances_.get(), 0, svgd_row_blocks(particles_.count));
    }
    for (int64_t i = 0; i < particles_.count; ++i) {
      const T* row = distances_.get() + i * padded;
      std::copy(row, row + particles_.count, result + i * particles_.count);
    }
  }

 private:
  T next_above(T value) {
    T next = std::numeric_limits<T>::infinity();
    std::mutex mutex;
    for_triangle([&](int64_t begin, int64_t end) {
      both_ends(begin, end, [&](int64_t first, int64_t last) {
        const T own = svgd_next_above(particles_, value, first, last);
        const std::lock_guard<std::mutex> lock(mutex);
        next = std::min(next, own);
      });
    });
    return next;
  }

  template <typename Function>
  void parallel(int64_t items, int64_t work_per_item, const Function& function) {
    const int64_t grain =
        std::max<int64_t>(1, kWorkPerThread / std::max<int64_t>(1, work_per_item));
    if (items <= grain) {
      function(0, items);
    } else {
      torch::stable::parallel_for(0, items, grain, function);
    }
  }

  template <typename Function>
  void for_row_blocks(const Function& function) {
    parallel(svgd_row_blocks(particles_.count), kRowBlock * particles_.count * particles_.dim,
             function);
  }

  // Row blocks of the pairs i < j shrink towards the end, so each item is one from either end.
  template <typename Function>
  void for_triangle(const Function& function) {
    const int64_t work = particles_.distances ? 1 : particles_.dim;
    parallel((svgd_row_blocks(particles_.count) + 1) / 2, kRowBlock * particles_.count * work,
             function);
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
void with_svgd(const SvgdParticles& particles, const Function& function) {
  if (particles.type == ScalarType::float64) {
    SvgdOnCpu<double> svgd(particles);
    function(svgd, double{});
  } else {
    SvgdOnCpu<float> svgd(particles);
    function(svgd, float{});
  }
}

Tensor svgd_bandwidth(Tensor particles, int64_t rule, int64_t /*form*/) {
  const Rows rows = svgd_rows(particles);
  const SvgdParticles matrix = svgd_particles(rows);
  Tensor result = new_tensor(particles, {}, accumulate_dtype(matrix.type));
  with_svgd(matrix, [&](auto& svgd, auto zero) {
    using T = decltype(zero);
    *static_cast<T*>(result.mutable_data_ptr()) = svgd.bandwidth(bandwidth_rule(rule));
  });
  return result;
}

Tensor svgd_update(Tensor particles, Tensor score, std::optional<Tensor> bandwidth, int64_t rule,
                   double bandwidth_number, int64_t kernel, double repulsion,
                   std::optional<double> step_size, int64_t precision, int64_t /*form*/) {
  const SvgdArguments arguments(particles, score, bandwidth, bandwidth_number, kernel, repulsion,
                                step_size, precision);
  const SvgdUpdate& update = arguments.update;
  with_svgd(update.particles, [&](auto& svgd, auto zero) {
    using T = decltype(zero);
    const T number = update.bandwidth != nullptr ? *static_cast<const T*>(update.bandwidth)
                     : rule >= 0                 ? svgd.bandwidth(bandwidth_rule(rule))
                                                 : static_cast<T>(update.bandwidth_number);
    svgd.update(update, number);
  });
  return arguments.result;
}

Tensor svgd_distances(Tensor particles) {
  const Rows rows = svgd_rows(particles);
  const SvgdParticles matrix = svgd_particles(rows);
  Tensor result =
      new_tensor(particles, {matrix.count, matrix.count}, accumulate_dtype(matrix.type));
  with_svgd(matrix, [&](auto& svgd, auto zero) {
    svgd.copy_distances(static_cast<decltype(zero)*>(result.mutable_data_ptr()));
  });
  return result;
}

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CPU, library) {
  library.impl("svgd_bandwidth", TORCH_BOX(&fused_ops::svgd_bandwidth));
  library.impl("svgd_update", TORCH_BOX(&fused_ops::svgd_update));
  library.impl("svgd_distances", TORCH_BOX(&fused_ops::svgd_distances));
}
