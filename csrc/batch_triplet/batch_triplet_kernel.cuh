// SPDX-License-Identifier: BSD-3-Clause
// The mining, a block for each anchor.
//
// Distances take the place of inner products, then coefficients the place of distances. The
// positives are sorted in shared memory, at most kMostPositives at a time. For "all" these are
// thresholds t = d_ip + margin: a negative takes part in as many triplets as there are thresholds
// above its distance, and counts itself into the bin of the first, from which each positive learns
// how many negatives lie below its threshold. The loss is the sum of count * (d + margin) over
// the positives minus that of count * d over the negatives. For "semihard" each bin keeps the
// nearest negative that lies there, and a positive takes that of the first bin behind it that has
// one.
//
// All sums have a fixed order, and atomics are of integers or minima, so results repeat bit for
// bit.

#pragma once

#include <cstdint>

#include "batch_triplet/batch_triplet_block.cuh"

namespace fused_ops {

template <typename T>
struct AllShared {
  T distances[kMostPositives];  // of the positives
  int bins[kMostPositives];
};

template <typename scalar>
__device__ void mine_all(const AnchorRow<scalar>& a, Accumulated<scalar>* scratch,
                         AllShared<Accumulated<scalar>>& shared, BatchTotals& totals) {
  using T = Accumulated<scalar>;
  const T margin = static_cast<T>(a.call.margin);
  const bool single = a.positives <= kMostPositives, write = a.call.coefficients;
  for (int64_t first = 0; first < a.positives; first += kMostPositives) {
    const int size = static_cast<int>(a.positives - first < kMostPositives ? a.positives - first
                                                                           : kMostPositives);
    __syncthreads();  // until the last piece is read
    a.for_positives(first, size, [&](int64_t j, int rank) { shared.distances[rank] = a.row[j]; });
    for (int k = threadIdx.x; k < size; k += kMineThreads) shared.bins[k] = 0;
    __syncthreads();
    sort_in_block(shared.distances, size);
    a.for_negatives([&](int64_t j) {
      const T d = a.row[j];
      const int bin = rank_in<true>(shared.distances, size, d, margin);
      const int above = size - bin;
      if (above > 0) {
        atomicAdd(&shared.bins[bin], 1);
        totals.loss -= static_cast<double>(above) * d;
      }
      if (!write) return;
      if (single) {
        a.row[j] = a.coefficient(-static_cast<T>(above), d);
      } else {
        scratch[j] = static_cast<T>(above) + (first == 0 ? T(0) : scratch[j]);
      }
    });
    __syncthreads();
    scan_in_block<AddInts, false>(shared.bins, size);
    for (int k = threadIdx.x; k < size; k += kMineThreads) {
      const double below = shared.bins[k];
      totals.active += below;
      if (below > 0) totals.loss += below * shared.distances[k];  // which may be infinite
    }
    if (!write) continue;
    a.for_positives(first, size, [&](int64_t j, int) {
      const T d = a.row[j];
      const int k = rank_in<false>(shared.distances, size, d);
      a.row[j] = a.coefficient(static_cast<T>(shared.bins[k]), d);
    });
  }
  if (write && !single) {
    a.for_negatives([&](int64_t j) { a.row[j] = a.coefficient(-scratch[j], a.row[j]); });
  }
  if (threadIdx.x == 0) {
    if (write && a.own >= 0) a.row[a.own] = 0;
    totals.positives = static_cast<double>(a.positives);
    totals.negatives = static_cast<double>(a.negatives);
    totals.items = totals.positives * totals.negatives;
  }
}

// Distances are never negative, so their bits order alike.
template <typename T>
struct DistanceBits;
template <>
struct DistanceBits<float> {
  using type = unsigned;
  static __device__ type of(float d) { return __float_as_uint(d); }
  static __device__ float to(type bits) { return __uint_as_float(bits); }
};
template <>
struct DistanceBits<double> {
  using type = unsigned long long;
  static __device__ type of(double d) { return static_cast<type>(__double_as_longlong(d)); }
  static __device__ double to(type bits) {
    return __longlong_as_double(static_cast<long long>(bits));
  }
};

template <typename T>
__device__ void add_item(T positive, T negative, const BatchTriplet& call, BatchTotals& totals,
                         T& weight) {
  const auto item = item_loss(positive - negative + static_cast<T>(call.margin), call.soft);
  weight = item.weight;
  totals.merge({item.loss, 1, item.loss > 0 ? 1.0 : 0.0, positive, 1, negative, 1});
}

template <typename T>
struct SemihardShared {
  T distances[kMostPositives];
  T weights[kMostPositives];
  typename DistanceBits<T>::type nearest[kMostPositives];  // negative in a bin, its distance
  int index[kMostPositives];                               // and its index
  int next[kMostPositives];                                // the first bin from here that has one
  Largest<T> parts[kMineWarps];
};

template <typename scalar>
__device__ void mine_semihard(const AnchorRow<scalar>& a, Accumulated<scalar>* scratch,
                              SemihardShared<Accumulated<scalar>>& shared, BatchTotals& totals) {
  using T = Accumulated<scalar>;
  using Bits = DistanceBits<T>;
  constexpr typename Bits::type nowhere = ~typename Bits::type{0};
  const bool single = a.positives <= kMostPositives, write = a.call.coefficients;
  Largest<T> farthest{};
  a.for_negatives([&](int64_t j) {
    farthest.merge({a.row[j], j});
    if (write && !single) scratch[j] = 0;
  });
  farthest = reduce_group(farthest, kMineThreads, shared.parts);
  for (int64_t first = 0; first < a.positives; first += kMostPositives) {
    const int size = static_cast<int>(a.positives - first < kMostPositives ? a.positives - first
                                                                           : kMostPositives);
    __syncthreads();  // until the last piece is read
    a.for_positives(first, size, [&](int64_t j, int rank) { shared.distances[rank] = a.row[j]; });
    for (int k = threadIdx.x; k < size; k += kMineThreads) {
      shared.nearest[k] = nowhere;
      shared.index[k] = INT32_MAX;
    }
    __syncthreads();
    sort_in_block(shared.distances, size);
    // The bin of the last positive that is nearer than the negative; -1 for none.
    const auto bin_of = [&](T d) { return rank_in<false>(shared.distances, size, d) - 1; };
    a.for_negatives([&](int64_t j) {
      const T d = a.row[j];
      const int bin = bin_of(d);
      // Most negatives lie in the last bin: reading first spares their atomics.
      if (bin >= 0 &&
          Bits::of(d) < *static_cast<volatile decltype(nowhere)*>(&shared.nearest[bin])) {
        atomicMin(&shared.nearest[bin], Bits::of(d));
      }
    });
    __syncthreads();
    a.for_negatives([&](int64_t j) {
      const T d = a.row[j];
      const int bin = bin_of(d);
      if (bin >= 0 && Bits::of(d) == shared.nearest[bin]) {
        atomicMin(&shared.index[bin], static_cast<int>(j));
      }
    });
    for (int k = threadIdx.x; k < size; k += kMineThreads) {
      shared.next[k] = shared.nearest[k] == nowhere ? INT32_MAX : k;
    }
    __syncthreads();
    scan_in_block<MinInts, true>(shared.next, size);
    const auto negative_of = [&](int k) -> Largest<T> {
      const int bin = shared.next[k];
      if (bin == INT32_MAX) return farthest;
      return {Bits::to(shared.nearest[bin]), shared.index[bin]};
    };
    for (int k = threadIdx.x; k < size; k += kMineThreads) {
      add_item(shared.distances[k], negative_of(k).value, a.call, totals, shared.weights[k]);
    }
    if (!write) continue;
    __syncthreads();
    a.for_positives(first, size, [&](int64_t j, int) {
      const T d = a.row[j];
      a.row[j] = a.coefficient(shared.weights[rank_in<false>(shared.distances, size, d)], d);
    });
    if (single) a.for_negatives([&](int64_t j) { a.row[j] = 0; });
    __syncthreads();
    // Positives that share a negative are neighbours: the first of them adds up their weights.
    for (int k = threadIdx.x; k < size; k += kMineThreads) {
      const Largest<T> negative = negative_of(k);
      if (k > 0 && negative_of(k - 1).index == negative.index) continue;
      T sum = shared.weights[k];
      for (int other = k + 1; other < size && negative_of(other).index == negative.index; ++other) {
        sum += shared.weights[other];
      }
      if (single) {
        a.row[negative.index] = a.coefficient(-sum, negative.value);
      } else {
        scratch[negative.index] += sum;
      }
    }
  }
  if (write && !single) {
    __syncthreads();
    a.for_negatives([&](int64_t j) { a.row[j] = a.coefficient(-scratch[j], a.row[j]); });
  }
  if (write && threadIdx.x == 0 && a.own >= 0) a.row[a.own] = 0;
}

template <typename scalar>
__device__ void mine_hard(const AnchorRow<scalar>& a, HardPicks<Accumulated<scalar>>& picks,
                          Largest<Accumulated<scalar>>* parts, BatchTotals& totals) {
  using T = Accumulated<scalar>;
  Largest<T> positive{}, negative{};  // of the negative, with its distance negated
  for (int64_t j = threadIdx.x; j < a.count; j += kMineThreads) {
    if (!a.has_label(j)) {
      negative.merge({-a.row[j], j});
    } else if (j != a.own) {
      positive.merge({a.row[j], j});
    }
  }
  positive = reduce_group(positive, kMineThreads, parts);
  negative = reduce_group(negative, kMineThreads, parts);
  if (threadIdx.x > 0) return;
  T weight;
  add_item(positive.value, -negative.value, a.call, totals, weight);
  picks = {positive.index, negative.index, a.coefficient(weight, positive.value),
           a.coefficient(-weight, -negative.value)};
}

template <typename scalar, Mining mining>
__global__ void __launch_bounds__(kMineThreads)
    batch_mine_kernel(const __grid_constant__ BatchTriplet call,
                      const __grid_constant__ BatchChunk chunk) {
  using T = Accumulated<scalar>;
  using Shared = std::conditional_t<
      mining == Mining::all, AllShared<T>,
      std::conditional_t<mining == Mining::semihard, SemihardShared<T>, Largest<T>[kMineWarps]>>;
  __shared__ alignas(16) char memory[sizeof(Shared)];
  __shared__ BatchTotals parts[kMineWarps];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  AnchorRow<scalar> a(call, chunk);
  BatchTotals totals{};
  a.form_distances(totals);
  T* const scratch = chunk.scratch == nullptr
                         ? nullptr
                         : static_cast<T*>(chunk.scratch) + int64_t{blockIdx.x} * a.count;
  HardPicks<T> picks{-1, -1, T(0), T(0)};
  const bool none = a.positives == 0 || a.negatives == 0;
  if (none || a.first_nan != INT64_MAX) {
    const double nan = NAN;
    totals = {};
    if (!none && threadIdx.x == 0) {
      const auto positives = static_cast<double>(a.positives);
      const auto negatives = static_cast<double>(a.negatives);
      totals = mining == Mining::all
                   ? BatchTotals{nan, positives * negatives, 0, nan, positives, nan, negatives}
               : mining == Mining::semihard
                   ? BatchTotals{nan, positives, 0, nan, positives, nan, positives}
                   : BatchTotals{nan, 1, 0, nan, 1, nan, 1};
      picks = {a.first_nan, a.first_nan, static_cast<T>(nan), static_cast<T>(nan)};
    }
    if (mining != Mining::hard && call.coefficients) a.fill(none ? T(0) : static_cast<T>(nan));
  } else if constexpr (mining == Mining::all) {
    mine_all(a, scratch, shared, totals);
  } else {
    totals = {};
    if constexpr (mining == Mining::semihard) {
      mine_semihard(a, scratch, shared, totals);
    } else {
      mine_hard(a, picks, shared, totals);
    }
  }
  totals = reduce_group(totals, kMineThreads, parts);
  if (threadIdx.x > 0) return;
  if (mining == Mining::all) totals.loss = counted_loss(totals, static_cast<T>(call.margin));
  chunk.totals[a.anchor] = totals;
  if (mining == Mining::hard) static_cast<HardPicks<T>*>(chunk.picks)[a.anchor] = picks;
}

}  // namespace fused_ops
