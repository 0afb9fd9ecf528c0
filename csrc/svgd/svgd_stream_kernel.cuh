// SPDX-License-Identifier: BSD-3-Clause
// The sums of the SVGD update on Hopper's tensor cores, streamed like attention.
//
// For each tile of particles j that passes through the ring (svgd_ring.cuh) a warpgroup forms
//   S = y_i y_j           in three products of halves,
//   K = 2^(slope S + bias_i + bias_j)    split into high and low halves in registers, where an
//                                        accumulator is laid out as the operand that comes next,
//   sum_j K V_j           in three products again.
// The last goes into fresh accumulators for each tile, added in float32: one accumulation over all
// j in the tensor cores lost digits (1e-3 at 32768 x 64 against 8e-6).
//
// Three warpgroups fill the registers up to 64 dimensions: while one forms K the others multiply.

#pragma once

#include "svgd/svgd_ring.cuh"
#include "svgd/svgd_stream.cuh"

namespace fused_ops {

template <int dim>
using StreamShape = RingShape<dim, dim <= 64 ? 3 : 2, dim <= 192 ? 8 : 6, dim <= 192 ? 4 : 2>;

template <int dim>
using StreamShared = RingShared<StreamShape<dim>>;
static_assert(sizeof(StreamShared<256>) <= 227 * 1024);
static_assert(sizeof(StreamShared<192>) <= 227 * 1024);
static_assert(sizeof(StreamShared<128>) <= 227 * 1024);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The tiles from `first` on: the slots of a tile's coordinates, and then those of its values.
template <typename Shape>
struct StreamSource {
  const StreamTask& task;
  int first;

  __device__ const __half* slot(int index) const {
    const int64_t tile = first + index / (2 * Shape::chunks);
    const int part = index % (2 * Shape::chunks);
    return part < Shape::chunks
               ? task.split.slots + (tile * Shape::chunks + part) * Shape::slot_size
               : task.values + (tile * Shape::chunks + part - Shape::chunks) * Shape::slot_size;
  }
};

// K of a tile from its products, as the two operands of the next product.
struct StreamWeights {
  uint32_t high[kSplitTile / 4];
  uint32_t low[kSplitTile / 4];

  // `bias_i` is that of this thread's two rows, `sums` of K over a tile are added to.
  // `diagonal` says that particles i and j are the same ones.
  __device__ void form(const float (&products)[32], float slope, const float (&bias_i)[2],
                       const Vector<float, 2> (&bias_j)[kSplitTile / 8], bool diagonal,
                       float (&sums)[2]) {
    const int row = threadIdx.x % kWarpgroupSize / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
    const int column = threadIdx.x % 4 * 2;
    float tile_sums[2] = {};
#pragma unroll
    for (int group = 0; group < kSplitTile / 8; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float k[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float exponent = fmaf(products[4 * group + 2 * half + e], slope,
                                      bias_i[half] + bias_j[group].value[e]);
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

// sums += K V for the dimensions of one slot.
template <int width, bool three_terms>
__device__ inline void multiply_values(const StreamWeights& weights, const __half* values,
                                       float (&sums)[width / 2]) {
  constexpr int row_bytes = kSplitTile * sizeof(__half);
  const uint64_t high = matrix_descriptor<row_bytes>(values);
  const uint64_t low = matrix_descriptor<row_bytes>(values + width * kSplitTile);
  float fresh[width / 2];
  mma_begin();
#pragma unroll
  for (int step = 0; step < kSplitTile / kMmaDepth; ++step) {
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
  const int own = static_cast<int>(blockIdx.x) * Shape::groups + group;
  const int query_tile = task.first_tile + (own < task.own_tiles ? own : task.own_tiles - 1);
  const int first = static_cast<int>(blockIdx.y) * task.tiles_per_split;
  const int left = task.tiles - first;
  const int tiles = left < task.tiles_per_split ? left : task.tiles_per_split;
  Ring<Shape, StreamSource<Shape>> ring{{task, first}, shared, tiles * 2 * Shape::chunks};
  ring.start(task.split.slots + int64_t{query_tile} * Shape::chunks * Shape::slot_size);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t row =
      int64_t{query_tile} * kSplitTile + threadIdx.x % kWarpgroupSize / kWarpSize * 16 + lane / 4;
  const float bias_i[2] = {task.bias[row] + kWeightExponent, task.bias[row + 8] + kWeightExponent};
  const float slope = task.state->slope;
  barrier_wait(&shared.query_full, 0);

  float sums[Shape::chunks][Shape::width / 2] = {};
  float weight_sums[2] = {};
  for (int tile = first; tile < first + tiles; ++tile) {
    Vector<float, 2> bias_j[kSplitTile / 8];  // loaded while the products are formed
#pragma unroll
    for (int part = 0; part < kSplitTile / 8; ++part) {
      bias_j[part] = load_pair(task.bias + int64_t{tile} * kSplitTile + 8 * part + lane % 4 * 2);
    }
    float products[32];
    ring.multiply_coordinates(products);
    StreamWeights weights;
    weights.form(products, slope, bias_i, bias_j, tile == query_tile, weight_sums);
#pragma unroll
    for (int chunk = 0; chunk < Shape::chunks; ++chunk) {
      multiply_values<Shape::width, three_terms>(weights, shared.ring[ring.take()], sums[chunk]);
      ring.release();
    }
  }

  if (own >= task.own_tiles) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = weight_sums[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int64_t target =
        blockIdx.y * own_rows(task) + row + 8 * half - int64_t{task.first_tile} * kSplitTile;
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
