// SPDX-License-Identifier: BSD-3-Clause
// The median of pairs that several processes share.
//
// Each process has all particles and counts its share of the pairs, in passes. After each pass it
// has a message of int64 words, whose sums over the processes are what the next pass starts from:
// all then decide alike. The last pass's sum gives the bandwidth.

#pragma once

#include <cstdint>

namespace fused_ops {

// Words of a message.
enum ShareWord : int {
  kShareBelow,       // pairs below the bracket
  kShareInside,      // pairs inside it
  kShareOverflowed,  // processes whose list of pairs inside is too short
  kShareNan,         // processes that met a NaN distance
  kShareBins,        // a histogram of 2^kShareDigitBits bins
};
constexpr int kShareDigitBits = 11;
// After the histogram comes a word for each process, which the others leave zero: the bits of the
// sum of its distances or, after the last pass, its next distance above the median.
constexpr int kShareSlots = kShareBins + (1 << kShareDigitBits);
constexpr int64_t share_words(int shares) { return kShareSlots + shares; }

// The passes: with a bracket three to count, and then in any case one for each digit of the median
// and one for the next distance above it.
struct SharePasses {
  enum { products, direct, narrow, digits };  // `digits` is the first of them
  int first;                                  // `products` or `digits`
  int next_above;

  constexpr SharePasses(bool bracket, int digit_count)
      : first(bracket ? products : digits), next_above(digits + digit_count) {}
  constexpr int count() const { return next_above + 1 - first; }
};

}  // namespace fused_ops
