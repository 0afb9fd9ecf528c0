// SPDX-License-Identifier: BSD-3-Clause
// CUDA kernels of triplet_margin_loss for odd rows that lie one behind another.
//
// Where rows do not start and end on 16-byte boundaries, inputs are taken as flat memory: a block
// brings a tile of rows to shared memory in whole accesses of 16 bytes, the next one while it is at
// work on another; only there do threads divide it into rows, element by element. Gradients take
// the place of what they are formed from, and leave as the tile came. What triplet_kernel.cuh says
// of reductions and of guessed gradients holds here too.
//
// triplet_tile_forward   loss, state and perhaps gradients
// triplet_tile_backward  gradients

#pragma once

#include "triplet/triplet_device.cuh"
#include "triplet/triplet_tile_copies.cuh"

namespace fused_ops {

// How the blocks share the rows: each has a range of them, in tiles, and an equal one but for what
// is less than `unit` rows.
struct TripletTileWalk {
  int rows;      // of a tile, a multiple of the block's groups
  int capacity;  // elements that the memory for each input has
  int unit;
  int threads_per_row;
};

// Rows in shared memory, from `shift` on, as they are off a 16-byte boundary.
template <typename scalar>
struct TripletTile {
  static constexpr int kWidth = kTripletAccessBytes / sizeof(scalar);
  scalar* memory;  // (3, capacity): anchor, positive and negative
  int capacity;
  int64_t first_row;
  int rows;
  int64_t begin;  // the first element that memory holds
  int shift;
  int end;  // of the rows, in memory

  __device__ TripletTile(const TripletInputs& in, scalar* memory, int capacity, int64_t first_row,
                         int rows)
      : memory(memory), capacity(capacity), first_row(first_row), rows(rows) {
    shift = static_cast<int>(first_row * in.dim % kWidth);
    begin = first_row * in.dim - shift;
    end = shift + rows * static_cast<int>(in.dim);
  }

  // Fetches the rows, and their neighbours in the same 16 bytes.
  __device__ void fetch(const TripletInputs& in, uint64_t* arrival) const {
    const int rounded = (end + kWidth - 1) / kWidth * kWidth;
    const int readable = static_cast<int>(min(in.rows * in.dim - begin, int64_t{rounded}));
    const int rest = readable / kWidth * kWidth;  // of the matrix, less than 16 bytes
    begin_fetches(arrival, 3 * rest * static_cast<int>(sizeof(scalar)));
    const auto fetch_input = [&](const void* input, scalar* to) {
      const scalar* from = static_cast<const scalar*>(input) + begin;
      fetch_flat(to, from, rest, arrival);
      // By the thread that has waited for the stores of this memory's last tile.
      for (int i = rest; threadIdx.x == 0 && i < end; ++i) to[i] = from[i];
    };
    fetch_input(in.anchor, memory);
    fetch_input(in.positive, memory + capacity);
    fetch_input(in.negative, memory + 2 * capacity);
  }

  // Stores the gradients that have taken the inputs' place.
  __device__ void store(const TripletGradients& gradients) const {
    const int whole = min((shift + kWidth - 1) / kWidth * kWidth, end);  // [whole, rest) is that
    const int rest = max(end / kWidth * kWidth, whole);
    begin_stores();
    const auto store_gradient = [&](void* gradient, const scalar* from) {
      if (gradient == nullptr) return;
      scalar* to = static_cast<scalar*>(gradient) + begin;
      store_flat(to + whole, from + whole, rest - whole);
      for (int i = shift + threadIdx.x; i < whole; i += blockDim.x) to[i] = from[i];
      for (int i = rest + threadIdx.x; i < end; i += blockDim.x) to[i] = from[i];
    };
    store_gradient(gradients.anchor, memory);
    store_gradient(gradients.positive, memory + capacity);
    store_gradient(gradients.negative, memory + 2 * capacity);
    end_stores();
  }

  __device__ scalar* row(int index, int64_t dim) const {
    return memory + shift + index * static_cast<int>(dim);
  }
};

// A thread's elements of a row.
template <typename scalar>
struct TripletTileRow {
  static constexpr int kBatch = 4;  // elements that are loaded before the first is used
  scalar* anchor;
  int capacity, dim, thread, threads;

  // Calls `visit(element, a, p, n)` with each.
  template <typename Visit>
  __device__ void for_each_element(Visit visit) const {
    scalar* element = anchor + thread;
    scalar* const end = anchor + dim;
    for (; element + (kBatch - 1) * threads < end; element += kBatch * threads) {
      scalar a[kBatch], p[kBatch], n[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        a[i] = element[i * threads];
        p[i] = element[i * threads + capacity];
        n[i] = element[i * threads + 2 * capacity];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) visit(element + i * threads, a[i], p[i], n[i]);
    }
    for (; element < end; element += threads) {
      visit(element, element[0], element[capacity], element[2 * capacity]);
    }
  }

  template <Norm norm, typename T, bool with_swap>
  __device__ void add_to(Distances<norm, T, with_swap>& distances, T eps) const {
    for_each_element([&](scalar*, scalar a, scalar p, scalar n) {
      distances.add(to_accumulate(a), to_accumulate(p), to_accumulate(n), eps);
    });
  }

  // Puts the gradients in the inputs' place.
  template <Norm norm, typename T>
  __device__ void form(bool inactive, T eps, bool swap, const TripletDistances<T>& d,
                       const TripletCoefficients<T>& c) const {
    for_each_element([&](scalar* element, scalar a, scalar p, scalar n) {
      TripletElementGradient<T> gradient{};
      if (!inactive) {
        gradient = element_gradient<norm>(to_accumulate(a), to_accumulate(p), to_accumulate(n), eps,
                                          swap, d, c);
      }
      element[0] = from_accumulate<scalar>(gradient.anchor);
      element[capacity] = from_accumulate<scalar>(gradient.positive);
      element[2 * capacity] = from_accumulate<scalar>(gradient.negative);
    });
  }
};

// Calls `work` with each of the block's tiles; the next one comes meanwhile.
template <typename scalar, typename Work>
__device__ inline void for_each_tile(const TripletInputs& in, const TripletTileWalk& walk,
                                     Work work) {
  extern __shared__ uint4 tile_memory[];
  __shared__ uint64_t arrivals[kTripletTileStages];
  const auto row_of_block = [&](int block) {
    const int64_t units = (in.rows + walk.unit - 1) / walk.unit;
    return min(units * block / gridDim.y * walk.unit, in.rows);
  };
  const int64_t end = row_of_block(blockIdx.y + 1);
  const auto tile_at = [&](int64_t row, int stage) {
    scalar* memory = reinterpret_cast<scalar*>(tile_memory) + stage * 3 * walk.capacity;
    const int rows = static_cast<int>(min(end - row, int64_t{walk.rows}));
    return TripletTile<scalar>(in, memory, walk.capacity, row, rows);
  };
  const auto fetch = [&](int64_t row, int stage) {
    if (row < end) tile_at(row, stage).fetch(in, &arrivals[stage]);
    end_fetches();
  };
  begin_copies(arrivals);
  int stage = 0;
  int phase = 0;
  int64_t row = row_of_block(blockIdx.y);
  for (fetch(row, 0); row < end; row += walk.rows) {
    fetch(row + walk.rows, 1 - stage);
    wait_for_fetches(&arrivals[stage], phase);
    work(tile_at(row, stage));
    __syncthreads();  // until the tile's memory is free
    phase ^= stage;
    stage = 1 - stage;
  }
  end_copies();
}

template <typename scalar, Norm norm, bool with_swap, typename T>
__device__ inline double forward_tiles(const TripletForward& params,
                                       const TripletGradients& gradients,
                                       const TripletExpectation& expected,
                                       const TripletTileWalk& walk) {
  __shared__ Distances<norm, T, with_swap> shared[kMaxTripletWarps];
  const TripletInputs& in = params.inputs;
  const int thread = threadIdx.x % walk.threads_per_row;
  const int groups = blockDim.x / walk.threads_per_row;
  const T eps = static_cast<T>(in.eps);
  double loss = 0;
  for_each_tile<scalar>(in, walk, [&](const TripletTile<scalar>& tile) {
    // Every thread takes part in a reduction, also where the tile has no row for it.
    for (int row = threadIdx.x / walk.threads_per_row; row < walk.rows; row += groups) {
      const int dim = row < tile.rows ? static_cast<int>(in.dim) : 0;
      const TripletTileRow<scalar> elements{tile.row(row, in.dim), walk.capacity, dim, thread,
                                            walk.threads_per_row};
      Distances<norm, T, with_swap> distances;
      elements.add_to(distances, eps);
      distances = reduce_group(distances, walk.threads_per_row, shared);
      if (row >= tile.rows) continue;
      loss += finish_row<norm, scalar>(
          params, tile.first_row + row, thread, distances, expected.forms,
          static_cast<T>(expected.upstream),
          [&](bool inactive, const TripletDistances<T>& d, const TripletCoefficients<T>& c) {
            elements.template form<norm>(inactive, eps, with_swap, d, c);
          });
    }
    if (expected.forms) tile.store(gradients);
  });
  return loss;
}

// As triplet_forward.
template <typename scalar, Norm norm>
__global__ void __launch_bounds__(kTripletLargestBlock,
                                  kTripletThreadsPerProcessor / kTripletLargestBlock)
    triplet_tile_forward(const __grid_constant__ TripletForward params,
                         const __grid_constant__ TripletGradients gradients, int guess,
                         TripletTileWalk walk,
                         TripletHandovers<norm, typename AccumulateType<scalar>::type> handovers) {
  using T = typename AccumulateType<scalar>::type;
  const TripletExpectation expected = expect_upstream(params, guess);
  const double loss =
      params.inputs.swap ? forward_tiles<scalar, norm, true, T>(params, gradients, expected, walk)
                         : forward_tiles<scalar, norm, false, T>(params, gradients, expected, walk);
  if (params.reduction != Reduction::none) add_losses<scalar>(params, loss, handovers);
}

// As triplet_backward.
template <typename scalar, Norm norm>
__global__ void __launch_bounds__(kTripletLargestBlock,
                                  kTripletThreadsPerProcessor / kTripletLargestBlock)
    triplet_tile_backward(const __grid_constant__ TripletBackward params,
                          const TripletStateHeader* header, TripletTileWalk walk) {
  using T = typename AccumulateType<scalar>::type;
  const TripletInputs& in = params.inputs;
  if (all_are_formed<scalar, T>(params, header)) return;
  const int thread = threadIdx.x % walk.threads_per_row;
  const int groups = blockDim.x / walk.threads_per_row;
  for_each_tile<scalar>(in, walk, [&](const TripletTile<scalar>& tile) {
    for (int row = threadIdx.x / walk.threads_per_row; row < tile.rows; row += groups) {
      const int64_t matrix_row = tile.first_row + row;
      const auto known =
          load_row<norm>(params, matrix_row, load_upstream<scalar, T>(params, matrix_row));
      const TripletTileRow<scalar> elements{tile.row(row, in.dim), walk.capacity,
                                            static_cast<int>(in.dim), thread, walk.threads_per_row};
      elements.template form<norm>(known.inactive, static_cast<T>(in.eps), in.swap, known.distances,
                                   known.coefficients);
    }
    tile.store(params.gradients);
  });
}

}  // namespace fused_ops
