// SPDX-License-Identifier: BSD-3-Clause
// CUDA kernels of triplet_margin_loss_indexed.
//
// All read rows of the embeddings where they are, most of them out of the L2 cache, for a row is
// named by many triplets. Groups of up to a warp's threads take a row each.
//
// triplet_indexed_forward   loss and state, a triplet to a group
// triplet_indexed_backward  gradients of the rows, from the sorted entries (triplet_indexed.h)
// triplet_indexed_combine   those of rows that the one before has left in parts
//
// The backward cuts the sorted entries into shares of one size, whatever rows they name: a row that
// all triplets share keeps as many groups busy as rows that few do. A group adds the entries of its
// share in order. A run within the share is the row's gradient; of one that goes on beyond it the
// sum is left to the last kernel, which adds the sums in the order of the shares. So there are no
// atomics, and results repeat bit for bit. Inactive triplets cost their state, but no row.

#pragma once

#include <type_traits>

#include "triplet/triplet_device.cuh"
#include "triplet/triplet_indexed.h"
#include "triplet/triplet_indexed_tuning.h"

namespace fused_ops {

static_assert(kIndexedLargestGroup <= kWarpSize, "groups meet by __syncwarp()");
static_assert(kIndexedBlock <= kTripletLargestBlock, "reductions hold kMaxTripletWarps values");

// What one load brings, where rows do not start and end on 16-byte boundaries.
template <typename scalar>
struct SingleElement {
  scalar value;

  static __device__ SingleElement load(const scalar* address) { return {*address}; }
  __device__ scalar get(int) const { return value; }
};

template <typename scalar, bool whole>
using IndexedAccess = std::conditional_t<whole, Packed<scalar>, SingleElement<scalar>>;

template <typename scalar, bool whole>
constexpr int kIndexedWidth = whole ? kTripletAccessBytes / static_cast<int>(sizeof(scalar)) : 1;

// The columns that a thread has of a row: those of its accesses, from `first` on, `step` apart.
template <typename scalar, bool whole, int accesses>
struct IndexedColumns {
  static constexpr int width = kIndexedWidth<scalar, whole>;
  using Access = IndexedAccess<scalar, whole>;

  int64_t first;
  int step;
  int left;  // columns of the row from `first` on, or what is more than the accesses reach

  __device__ IndexedColumns(int64_t tile, const TripletGroup& group, int64_t dim)
      : first((tile * accesses * group.size + group.thread) * width),
        step(group.size * width),
        left(static_cast<int>(min(dim - first, int64_t{accesses} * step))) {}

  __device__ bool contains(int access) const { return access * step < left; }
  __device__ void load(const scalar* row, Access (&to)[accesses]) const {
    row += first;
#pragma unroll
    for (int i = 0; i < accesses; ++i) {
      if (contains(i)) to[i] = Access::load(row + i * step);
    }
  }
};

template <typename scalar>
__device__ inline const scalar* embedding(const TripletInputs& in, int64_t row) {
  return static_cast<const scalar*>(in.anchor) + row * in.anchor_stride;
}

template <typename scalar, Norm norm, bool whole>
__global__ void __launch_bounds__(kIndexedBlock, kIndexedLeastBlocks) triplet_indexed_forward(
    const __grid_constant__ TripletForward params, int threads_per_row,
    TripletHandovers<norm, typename AccumulateType<scalar>::type> handovers) {
  using T = typename AccumulateType<scalar>::type;
  constexpr int accesses = kIndexedForwardAccesses;
  using Columns = IndexedColumns<scalar, whole, accesses>;
  __shared__ Distances<norm, T> shared[kMaxTripletWarps];
  expect_upstream(params, 0);
  const TripletInputs& in = params.inputs;
  const TripletGroup group(threads_per_row);
  const int64_t tile_size = int64_t{threads_per_row} * accesses * Columns::width;
  double loss = 0;
  // The bound is the block's, not the group's: every thread takes part in a reduction.
  for (int64_t first = int64_t{blockIdx.y} * group.count; first < in.rows;
       first += int64_t{gridDim.y} * group.count) {
    const int64_t triplet = first + group.index;
    Distances<norm, T> distances;
    if (triplet < in.rows) {
      const scalar* rows[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        rows[i] = embedding<scalar>(in, entry_row(in, i * in.rows + triplet));
      }
      Distances<norm, T> run;
      for (int64_t tile = 0; tile * tile_size < in.dim; ++tile) {
        if (tile % kIndexedRun == 0) {
          distances.merge(run);
          run = {};
        }
        const Columns columns(tile, group, in.dim);
        typename Columns::Access loaded[3][accesses];
#pragma unroll
        for (int i = 0; i < 3; ++i) columns.load(rows[i], loaded[i]);
#pragma unroll
        for (int i = 0; i < accesses; ++i) {
          if (!columns.contains(i)) break;
#pragma unroll
          for (int k = 0; k < Columns::width; ++k) {
            run.add(to_accumulate(loaded[0][i].get(k)), to_accumulate(loaded[1][i].get(k)),
                    to_accumulate(loaded[2][i].get(k)), static_cast<T>(in.eps));
          }
        }
      }
      distances.merge(run);
    }
    distances = reduce_group(distances, threads_per_row, shared);
    if (triplet < in.rows) {
      loss += finish_row<norm, scalar>(params, triplet, group.thread, distances);
    }
  }
  if (params.reduction != Reduction::none) add_losses<scalar>(params, loss, handovers);
}

// What the shares leave to triplet_indexed_combine: a row's sum of the run that comes from the
// share before, and of the one that goes on into the next without having come from before.
template <typename T>
struct IndexedParts {
  T* sums;          // (shares, 2, dim)
  int64_t* coming;  // (shares), the row whose sum is the first, or -1
  int64_t* going;   // (shares), the row whose sum is the second, or -1
};

// The sums of a thread's columns of one row's gradient.
template <typename scalar, Norm norm, bool whole>
struct IndexedSums {
  using T = typename AccumulateType<scalar>::type;
  static constexpr int accesses = indexed_backward_accesses(kIndexedWidth<scalar, whole>);
  using Columns = IndexedColumns<scalar, whole, accesses>;

  typename Columns::Access row[accesses];
  T sums[accesses][Columns::width];

  __device__ void begin(const scalar* embedding, const Columns& columns) {
    columns.load(embedding, row);
#pragma unroll
    for (int i = 0; i < accesses; ++i) {
#pragma unroll
      for (int k = 0; k < Columns::width; ++k) sums[i][k] = T(0);
    }
  }

  // Both other rows of the entry come at once.
  __device__ void add(const TripletInputs& in, const TripletEntry<T>& entry,
                      const Columns& columns) {
    typename Columns::Access other[2][accesses];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (n < entry.terms) columns.load(embedding<scalar>(in, entry.term[n].other), other[n]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (n >= entry.terms) break;
      const TripletTerm<T> term = entry.term[n];
#pragma unroll
      for (int i = 0; i < accesses; ++i) {
        if (!columns.contains(i)) break;
#pragma unroll
        for (int k = 0; k < Columns::width; ++k) {
          const T difference = to_accumulate(row[i].get(k)) - to_accumulate(other[n][i].get(k));
          sums[i][k] += scaled_phi<norm>(fma(term.sign, difference, static_cast<T>(in.eps)),
                                         term.distance, term.coefficient);
        }
      }
    }
  }

  template <typename To>
  __device__ void store(To* to, const Columns& columns) const {
    to += columns.first;
#pragma unroll
    for (int i = 0; i < accesses; ++i) {
      if (!columns.contains(i)) break;
#pragma unroll
      for (int k = 0; k < Columns::width; ++k) {
        to[i * columns.step + k] = from_accumulate<To>(sums[i][k]);
      }
    }
  }
};

template <typename scalar, Norm norm, bool whole>
__global__ void __launch_bounds__(kIndexedBlock, kIndexedLeastBlocks)
    triplet_indexed_backward(const __grid_constant__ TripletIndexedBackward params,
                             int threads_per_row, int64_t share_size,
                             IndexedParts<typename AccumulateType<scalar>::type> parts) {
  using T = typename AccumulateType<scalar>::type;
  using Sums = IndexedSums<scalar, norm, whole>;
  using Columns = typename Sums::Columns;
  __shared__ TripletEntry<T> block_entries[kIndexedBlock];
  const TripletInputs& in = params.backward.inputs;
  const TripletGroup group(threads_per_row);
  TripletEntry<T>* entries = block_entries + group.index * group.size;
  const auto row_of = [&](int64_t place) { return params.bits.row_of(params.order[place]); };
  const auto upstream = [&](int64_t triplet) {
    return row_upstream(load_upstream<scalar, T>(params.backward, triplet),
                        params.backward.reduction, in.rows);
  };

  const int64_t share = int64_t{blockIdx.x} * group.count + group.index;
  const int64_t count = 3 * in.rows;
  const int64_t begin = min(share * share_size, count);
  const int64_t end = min(begin + share_size, count);
  bool comes = false, goes = false;  // whether its first and last run are parts of longer ones
  if (begin < end) {
    const int64_t first_row = row_of(begin), last_row = row_of(end - 1);
    comes = begin > 0 && row_of(begin - 1) == first_row;
    goes = end < count && row_of(end) == last_row;
    if (group.thread == 0 && blockIdx.y == 0) {
      parts.coming[share] = comes ? first_row : -1;
      parts.going[share] = goes && !(comes && first_row == last_row) ? last_row : -1;
    }
  }

  for (int64_t tile = blockIdx.y; tile * group.size * Sums::accesses * Columns::width < in.dim;
       tile += gridDim.y) {
    const Columns columns(tile, group, in.dim);
    Sums sums;
    int64_t row = -1;   // of the run that is being summed
    bool came = comes;  // whether that is the first, and comes from the share before
    const auto end_run = [&](bool goes_on) {
      if (came || goes_on) {
        sums.store(parts.sums + (2 * share + (came ? 0 : 1)) * in.dim, columns);
      } else {
        sums.store(static_cast<scalar*>(params.gradient) + row * in.dim, columns);
      }
      came = false;
    };
    // The bound is the same for every group, since the threads of a warp meet in the loop.
    for (int64_t first = 0; first < share_size; first += group.size) {
      const int taken = static_cast<int>(
          max(min(min(end - begin, share_size) - first, int64_t{group.size}), int64_t{0}));
      __syncwarp();  // until the last entries are read
      if (group.thread < taken) {
        const int64_t entry = params.bits.entry_of(params.order[begin + first + group.thread]);
        entries[group.thread] = load_entry<norm, T>(params.backward, entry, upstream);
      }
      __syncwarp();
      for (int i = 0; i < taken; ++i) {
        const TripletEntry<T>& entry = entries[i];
        if (entry.row != row) {
          if (row >= 0) end_run(false);
          row = entry.row;
          sums.begin(embedding<scalar>(in, row), columns);
        }
        sums.add(in, entry, columns);
      }
    }
    if (begin < end) end_run(goes);
  }
}

// A block takes a share whose last run goes on, and adds up that row.
template <typename scalar>
__global__ void __launch_bounds__(kIndexedBlock)
    triplet_indexed_combine(scalar* gradient, int64_t dim, int64_t shares,
                            IndexedParts<typename AccumulateType<scalar>::type> parts) {
  using T = typename AccumulateType<scalar>::type;
  const int64_t share = blockIdx.x;
  const int64_t row = parts.going[share];
  if (row < 0) return;
  int64_t end = share + 1;  // behind the last share that has a part of the row
  while (end < shares && parts.coming[end] == row) ++end;
  for (int64_t column = threadIdx.x; column < dim; column += blockDim.x) {
    T sum = parts.sums[(2 * share + 1) * dim + column];
#pragma unroll 8
    for (int64_t other = share + 1; other < end; ++other) {
      sum += parts.sums[2 * other * dim + column];
    }
    gradient[row * dim + column] = from_accumulate<scalar>(sum);
  }
}

}  // namespace fused_ops
