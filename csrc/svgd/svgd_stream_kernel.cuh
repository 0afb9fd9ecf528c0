// SPDX-License-Identifier: BSD-3-Clause
// The sums of the SVGD update on Hopper's tensor cores, streamed like attention.
//
// A warpgroup owns 64 particles i; the warpgroups of a block share a ring of slots in shared memory
// through which the tiles of particles j pass (svgd_stream.cuh). For each tile it forms
//   S = y_i y_j       as high * low + low * high + high * high: 22 bits of each coordinate,
//   K = 2^(slope S + bias_i + bias_j)    split into high and low halves in registers, where an
//                                        accumulator is laid out as the operand that comes next,
//   sum_j K V_j       by the same three products.
// The last goes into fresh accumulators for each tile, added in float32: one accumulation over all
// j in the tensor cores lost digits (1e-3 at 32768 x 64 against 8e-6).
// One thread of the first warpgroup refills the ring `lag` slots behind that warpgroup, so that it
// waits for none of the others unless they are further behind.
//
// Three warpgroups fill the registers up to 64 dimensions: while one forms K the others multiply.

#pragma once

#include "common/device/wgmma.cuh"
#include "svgd/svgd_stream.cuh"

namespace fused_ops {

template <int dim>
struct StreamShape {
  static constexpr int width = stream_width(dim);
  static constexpr int chunks = dim / width;
  static constexpr int groups = dim <= 64 ? 3 : 2;
  static constexpr int slots = dim <= 192 ? 8 : 6;
  static constexpr int lag = dim <= 192 ? 4 : 2;
  // A warpgroup holds two slots of coordinates while it waits for nothing but its own products.
  static_assert(slots - lag > 2);
  static constexpr int slot_size = stream_slot_size(width);
  static constexpr int threads = groups * kWarpgroupSize;
  static constexpr int rows = groups * kStreamTile;
  static_assert(dim % width == 0 && width % kMmaDepth == 0);
};

template <int dim>
struct alignas(1024) StreamShared {
  using Shape = StreamShape<dim>;
  __half query[Shape::groups][Shape::chunks][Shape::slot_size];
  __half ring[Shape::slots][Shape::slot_size];
  float bias[Shape::slots][kStreamTile];
  uint64_t full[Shape::slots];
  uint64_t empty[Shape::slots];
  uint64_t query_full;
};
static_assert(sizeof(StreamShared<256>) <= 227 * 1024);
static_assert(sizeof(StreamShared<192>) <= 227 * 1024);
static_assert(sizeof(StreamShared<128>) <= 227 * 1024);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The tiles [first, first + count) of particles j as they pass through the ring. A warpgroup waits
// for slots at the head and gives them up at the tail.
template <int dim>
struct Stream {
  using Shape = StreamShape<dim>;

  const StreamTask& task;
  StreamShared<dim>& shared;
  int first;
  int total;         // slots
  int released = 0;  // by this warpgroup
  int head = 0;
  int tail = 0;
  int parity = 0;  // of the head

  __device__ void fill(int index) {
    const int target = index % Shape::slots;
    const int tile = first + index / (2 * Shape::chunks);
    const bool with_bias = index % (2 * Shape::chunks) == Shape::chunks - 1;
    constexpr int bytes = Shape::slot_size * sizeof(__half);
    constexpr int bias_bytes = kStreamTile * sizeof(float);
    uint64_t* full = &shared.full[target];
    barrier_expect(full, bytes + (with_bias ? bias_bytes : 0));
    const int64_t source = int64_t{first} * 2 * Shape::chunks + index;
    bulk_copy(shared.ring[target], task.slots + source * Shape::slot_size, bytes, full);
    if (with_bias) {
      bulk_copy(shared.bias[target], task.bias + int64_t{tile} * kStreamTile, bias_bytes, full);
    }
  }

  // The next slot, once it is full.
  __device__ int take() {
    barrier_wait(&shared.full[head], parity);
    const int slot = head;
    if (++head == Shape::slots) {
      head = 0;
      parity ^= 1;
    }
    return slot;
  }

  // Gives up the oldest slot; the warpgroup must be done with it.
  __device__ void release() {
    __syncwarp();  // all lanes have read the bias before one of them says so
    if (threadIdx.x % kWarpSize == 0) barrier_arrive(&shared.empty[tail]);
    const int freed = released - Shape::lag;
    if (threadIdx.x == 0 && freed >= 0 && freed + Shape::slots < total) {
      barrier_wait(&shared.empty[freed % Shape::slots], freed / Shape::slots % 2);
      fill(freed + Shape::slots);
    }
    __syncwarp();
    ++released;
    if (++tail == Shape::slots) tail = 0;
  }
};

// K of a tile from its products, as the two operands of the next product.
struct StreamWeights {
  uint32_t high[kStreamTile / 4];
  uint32_t low[kStreamTile / 4];

  // `bias_i` is that of this thread's two rows, `sums` of K over a tile are added to.
  // `diagonal` says that particles i and j are the same ones.
  __device__ void form(const float (&products)[32], float slope, const float (&bias_i)[2],
                       const float* bias_j, bool diagonal, float (&sums)[2]) {
    const int row = threadIdx.x % kWarpgroupSize / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
    const int column = threadIdx.x % 4 * 2;
    float tile_sums[2] = {};
#pragma unroll
    for (int group = 0; group < kStreamTile / 8; ++group) {
      const auto bias = load<2>(bias_j + 8 * group + column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float k[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float exponent =
              fmaf(products[4 * group + 2 * half + e], slope, bias_i[half] + bias.value[e]);
          k[e] = exp2_approximate(fminf(exponent, kWeightExponent));
          if (diagonal && row + 8 * half == 8 * group + column + e) k[e] = 0;
          tile_sums[half] += k[e];
        }
        const __half2 packed = __floats2half2_rn(k[0], k[1]);
        const float2 rounded = __half22float2(packed);
        const __half2 rest = __floats2half2_rn(k[0] - rounded.x, k[1] - rounded.y);
        high[2 * group + half] = *reinterpret_cast<const uint32_t*>(&packed);
        low[2 * group + half] = *reinterpret_cast<const uint32_t*>(&rest);
      }
    }
    sums[0] += tile_sums[0];
    sums[1] += tile_sums[1];
  }
};

// products = y_i y_j over all dimensions. Returns the tile's last slot of coordinates, which has
// its bias too and is not released.
template <int dim>
__device__ inline int multiply_coordinates(
    Stream<dim>& stream,
    const __half (&query)[StreamShape<dim>::chunks][StreamShape<dim>::slot_size],
    float (&products)[32]) {
  using Shape = StreamShape<dim>;
  constexpr int row_bytes = Shape::width * sizeof(__half);
  int slot = 0;
  mma_begin();
#pragma unroll
  for (int chunk = 0; chunk < Shape::chunks; ++chunk) {
    slot = stream.take();
    const __half* tile = stream.shared.ring[slot];
    const uint64_t i_high = matrix_descriptor<row_bytes>(query[chunk]);
    const uint64_t i_low = matrix_descriptor<row_bytes>(query[chunk] + Shape::slot_size / 2);
    const uint64_t j_high = matrix_descriptor<row_bytes>(tile);
    const uint64_t j_low = matrix_descriptor<row_bytes>(tile + Shape::slot_size / 2);
#pragma unroll
    for (int step = 0; step < Shape::width / kMmaDepth; ++step) {
      mma_shared(products, at_depth(i_high, step), at_depth(j_low, step), chunk + step > 0);
      mma_shared(products, at_depth(i_low, step), at_depth(j_high, step), true);
      mma_shared(products, at_depth(i_high, step), at_depth(j_high, step), true);
    }
    mma_commit();
    if (chunk > 0) {
      mma_wait<1>();
      stream.release();
    }
  }
  mma_wait<0>();
  return slot;
}

// sums += K V for the dimensions of one slot.
template <int width, bool three_terms>
__device__ inline void multiply_values(const StreamWeights& weights, const __half* values,
                                       float (&sums)[width / 2]) {
  constexpr int row_bytes = kStreamTile * sizeof(__half);
  const uint64_t high = matrix_descriptor<row_bytes>(values);
  const uint64_t low = matrix_descriptor<row_bytes>(values + width * kStreamTile);
  float fresh[width / 2];
  mma_begin();
#pragma unroll
  for (int step = 0; step < kStreamTile / kMmaDepth; ++step) {
    if constexpr (three_terms) {
      mma_registers(fresh, weights.high + 4 * step, at_depth(low, step), step > 0);
      mma_registers(fresh, weights.low + 4 * step, at_depth(high, step), true);
    }
    mma_registers(fresh, weights.high + 4 * step, at_depth(high, step), three_terms || step > 0);
  }
  mma_commit();
  mma_wait<0>();
#pragma unroll
  for (int index = 0; index < width / 2; ++index) sums[index] += fresh[index];
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// gridDim: tiles of particles i, splits of particles j. `three_terms` is "high"; without, K and V
// are used to 11 bits, "medium".
template <int dim, bool three_terms>
__global__ void __launch_bounds__(StreamShape<dim>::threads, 1)
    svgd_stream(const __grid_constant__ StreamTask task) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = StreamShape<dim>;
  extern __shared__ char memory[];
  auto& shared = *reinterpret_cast<StreamShared<dim>*>(memory);
  if (task.state->direct != 0) return;
  const auto group = static_cast<int>(threadIdx.x / kWarpgroupSize);
  const int tile_i = static_cast<int>(blockIdx.x) * Shape::groups + group;
  const int query_tile = tile_i < task.tiles ? tile_i : task.tiles - 1;
  const int first = static_cast<int>(blockIdx.y) * task.tiles_per_split;
  const int left = task.tiles - first;
  const int tiles = left < task.tiles_per_split ? left : task.tiles_per_split;
  Stream<dim> stream{task, shared, first, tiles * 2 * Shape::chunks};

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Shape::slots; ++slot) {
      barrier_create(&shared.full[slot], 1);
      barrier_create(&shared.empty[slot], Shape::groups * kWarpgroupSize / kWarpSize);
    }
    barrier_create(&shared.query_full, Shape::groups);
    barriers_created();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int index = 0; index < Shape::slots && index < stream.total; ++index) stream.fill(index);
  }
  if (threadIdx.x % kWarpgroupSize == 0) {
    constexpr int bytes = Shape::chunks * Shape::slot_size * sizeof(__half);
    barrier_expect(&shared.query_full, bytes);
    bulk_copy(shared.query[group],
              task.slots + int64_t{query_tile} * 2 * Shape::chunks * Shape::slot_size, bytes,
              &shared.query_full);
  }
  __syncwarp();
  const int lane = threadIdx.x % kWarpSize;
  const int64_t row =
      int64_t{query_tile} * kStreamTile + threadIdx.x % kWarpgroupSize / kWarpSize * 16 + lane / 4;
  const float bias_i[2] = {task.bias[row] + kWeightExponent, task.bias[row + 8] + kWeightExponent};
  const float slope = task.state->slope;
  barrier_wait(&shared.query_full, 0);

  float sums[Shape::chunks][Shape::width / 2] = {};
  float weight_sums[2] = {};
  for (int tile = first; tile < first + tiles; ++tile) {
    float products[32];
    const int slot = multiply_coordinates<dim>(stream, shared.query[group], products);
    StreamWeights weights;
    weights.form(products, slope, bias_i, shared.bias[slot], tile == query_tile, weight_sums);
    stream.release();
#pragma unroll
    for (int chunk = 0; chunk < Shape::chunks; ++chunk) {
      multiply_values<Shape::width, three_terms>(weights, shared.ring[stream.take()], sums[chunk]);
      stream.release();
    }
  }

  if (tile_i >= task.tiles) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = weight_sums[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int64_t target = blockIdx.y * task.split.padded_count + row + 8 * half;
    if (lane % 4 == 0) task.weights[target] = sum;
#pragma unroll
    for (int chunk = 0; chunk < Shape::chunks; ++chunk) {
#pragma unroll
      for (int column = 0; column < Shape::width / 8; ++column) {
        const float* pair = &sums[chunk][4 * column + 2 * half];
        store<2>(task.sums + target * dim + chunk * Shape::width + 8 * column + lane % 4 * 2,
                 Vector<float, 2>{pair[0], pair[1]});
      }
    }
  }
#else
  __trap();  // the launcher chooses this kernel on sm_90 only, for which 9.0a is compiled
#endif
}

}  // namespace fused_ops
