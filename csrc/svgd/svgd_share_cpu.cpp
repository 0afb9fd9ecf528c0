// SPDX-License-Identifier: BSD-3-Clause
// The CPU ops of a median whose pairs several processes share (svgd_share.h).

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "svgd/svgd_arguments.h"
#include "svgd/svgd_on_cpu.h"
#include "svgd/svgd_share.h"

namespace fused_ops {
namespace {

template <typename T>
constexpr SharePasses share_passes() {
  return {false, svgd_digits<T>(kShareDigitBits)};
}

// Takes the summed message of a digit's pass.
template <typename T>
void receive_digit(SvgdSearch<T>& search, int digit, const ShareArguments& arguments) {
  DigitCounts counts(kShareDigitBits);
  const int64_t* message = arguments.received;
  std::copy(message + kShareBins, message + kShareSlots, counts.bins.begin());
  counts.nan = message[kShareNan] != 0;
  search.settle(digit, counts);
  for (int share = 0; digit == 0 && share < arguments.share.count; ++share) {
    search.sum += std::bit_cast<double>(message[kShareSlots + share]);
  }
}

template <typename T>
void send_digit(SvgdOnCpu<T>& svgd, const SvgdSearch<T>& search, int digit, const PairShare& share,
                int64_t* sent) {
  std::vector<double> block_sums(svgd_row_blocks(search.count));
  const DigitCounts counts =
      svgd.count_digit(digit, kShareDigitBits, search.key, share, block_sums);
  std::copy(counts.bins.begin(), counts.bins.end(), sent + kShareBins);
  if (digit > 0) return;
  double sum = 0;
  for (const double part : block_sums) sum += part;
  sent[kShareNan] = counts.nan;
  sent[kShareSlots + share.index] = std::bit_cast<int64_t>(sum);
}

std::tuple<Tensor, int64_t, int64_t> svgd_share_memory(Tensor particles, int64_t /*shares*/,
                                                       int64_t /*form*/) {
  const Rows rows = svgd_matrix(particles);
  const bool wide = svgd_particles(rows).type == ScalarType::float64;
  const SharePasses passes = wide ? share_passes<double>() : share_passes<float>();
  constexpr int64_t bytes = sizeof(SvgdSearch<double>);
  return {new_tensor(particles, {bytes}, kByte), passes.first, passes.next_above};
}

Tensor svgd_share_pass(Tensor particles, Tensor memory, std::optional<Tensor> received,
                       int64_t rule, int64_t pass, int64_t share, int64_t shares,
                       int64_t /*form*/) {
  const Rows rows = svgd_matrix(particles);
  const SvgdParticles matrix = svgd_particles(rows);
  const ShareArguments arguments(memory, received, share, shares);
  Tensor message = torch::stable::fill_(new_tensor(particles, {share_words(shares)}, kLong), 0);
  auto* sent = static_cast<int64_t*>(message.mutable_data_ptr());
  const int digit = static_cast<int>(pass) - SharePasses::digits;
  with_svgd(matrix, false, [&](auto& svgd, auto zero) {
    using T = decltype(zero);
    auto& search = *static_cast<SvgdSearch<T>*>(memory.mutable_data_ptr());
    if (digit == 0) {
      search = SvgdSearch<T>(bandwidth_rule(rule), matrix.count);
    } else {
      receive_digit(search, digit - 1, arguments);
    }
    if (pass < share_passes<T>().next_above) {
      send_digit(svgd, search, digit, arguments.share, sent);
    } else {
      const double next = svgd.next_above(search.value(), arguments.share);
      sent[kShareSlots + share] = std::bit_cast<int64_t>(next);
    }
  });
  return message;
}

Tensor svgd_share_bandwidth(Tensor particles, Tensor memory, Tensor received, int64_t /*rule*/,
                            int64_t shares, int64_t /*form*/) {
  const ShareArguments arguments(memory, received, 0, shares);
  const ScalarType type = kernel_scalar_type(particles, "particles");
  Tensor result = new_tensor(particles, {}, accumulate_dtype(type));
  double next = std::numeric_limits<double>::infinity();
  for (int64_t share = 0; share < shares; ++share) {
    next = std::min(next, std::bit_cast<double>(arguments.received[kShareSlots + share]));
  }
  const auto write = [&](auto zero) {
    using T = decltype(zero);
    const auto& search = *static_cast<const SvgdSearch<T>*>(memory.const_data_ptr());
    *static_cast<T*>(result.mutable_data_ptr()) = search.bandwidth(static_cast<T>(next));
  };
  if (type == ScalarType::float64) {
    write(double{});
  } else {
    write(float{});
  }
  return result;
}

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CPU, library) {
  library.impl("svgd_share_memory", TORCH_BOX(&fused_ops::svgd_share_memory));
  library.impl("svgd_share_pass", TORCH_BOX(&fused_ops::svgd_share_pass));
  library.impl("svgd_share_bandwidth", TORCH_BOX(&fused_ops::svgd_share_bandwidth));
}
