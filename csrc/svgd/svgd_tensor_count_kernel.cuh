// SPDX-License-Identifier: BSD-3-Clause
// The pass of the bracketed median over all pairs, from products on Hopper's tensor cores
// (svgd_bracket.cuh).
//
// A warpgroup owns 64 particles i; 64 particles j at a time pass through the ring (svgd_ring.cuh).
// With T tiles, tile i takes the tiles i, i + 1, ..., i + T / 2 after it, around the end: each pair
// once, and the same work for all.
//
// An element of a tile costs seven instructions: its distance from the bracket's low end, the count
// of negative ones by their sign bit, and a store that only those in the bracket execute. They go
// to a stack of the thread's own in shared memory, as 27 bits of the distance and 5 of the place;
// after each tile the warp writes its stacks to the list.

#pragma once

#include "svgd/svgd_bracket.cuh"
#include "svgd/svgd_ring.cuh"
#include "svgd/svgd_tuning.h"

namespace fused_ops {

template <int dim>
using CountShape = RingShape<dim, dim <= 64 ? 4 : 2, dim <= 192 ? 6 : 4, dim <= 192 ? 2 : 1>;

constexpr int kTileElements = kSplitTile * kSplitTile / kWarpgroupSize;  // of a thread
static_assert(kTileElements == 32);  // 5 bits of a stack's entry

template <int dim>
struct CountRingShared : RingShared<CountShape<dim>> {
  unsigned stacks[kTileElements][CountShape<dim>::threads];
};
static_assert(sizeof(CountRingShared<64>) <= 227 * 1024);
static_assert(sizeof(CountRingShared<192>) <= 227 * 1024);
static_assert(sizeof(CountRingShared<256>) <= 227 * 1024);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The tiles from `first` on, around the end.
template <typename Shape>
struct CountSource {
  const SplitParticles& split;
  int first;
  int tiles;

  __device__ int tile(int index) const {
    const int tile = first + index / Shape::chunks;
    return tile < tiles ? tile : tile - tiles;
  }
  __device__ const __half* slot(int index) const {
    return split.slots +
           (int64_t{tile(index)} * Shape::chunks + index % Shape::chunks) * Shape::slot_size;
  }
};

// A warp's places in the list. It reserves many at a time: an atomic operation takes as long as a
// tile.
struct WarpList {
  const BracketTask& task;
  Count next = 0;
  int left = 0;

  // Room for `wanted` places; where the list has none, `next` is past its capacity.
  __device__ void reserve(int wanted) {
    if (wanted <= left) return;
    close();
    left = wanted > kListChunk ? wanted : kListChunk;
    if (threadIdx.x % kWarpSize == 0) {
      next = atomicAdd(&task.state->products.listed, static_cast<Count>(left));
    }
    next = __shfl_sync(0xffffffffu, next, 0);
  }

  // Marks the places that are left.
  __device__ void close() {
    for (int at = threadIdx.x % kWarpSize; at < left; at += kWarpSize) put(at, kNoKey, 0, 0);
  }

  __device__ void put(int at, unsigned key, int i, int j) {
    if (next + at >= static_cast<Count>(task.capacity)) return;
    task.list[next + at] = key;
    task.pairs[next + at] = {i, j};
  }
};

// A stack's entry: (distance & mask) | index in one instruction, which takes one literal only.
__device__ inline unsigned stack_entry(unsigned distance, unsigned index) {
  unsigned entry;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
      : "=r"(entry)
      : "r"(distance), "r"(~(kTileElements - 1u)), "r"(index));
  return entry;
}

// Where element `index` of a thread's accumulator stands in its tile (wgmma.cuh).
__device__ inline int element_row(int index) {
  return threadIdx.x % kWarpgroupSize / kWarpSize * 16 + threadIdx.x % kWarpSize / 4 +
         index / 2 % 2 * 8;
}
__device__ inline int element_column(int index) {
  return index / 4 * 8 + threadIdx.x % 4 * 2 + index % 2;
}

// Moves the warp's stacks to the list. `first_i` and `first_j` are the tile's first particles.
template <int threads>
__device__ inline void flush_stacks(unsigned (&stacks)[kTileElements][threads], int height,
                                    int first_i, int first_j, float low, float unscale,
                                    WarpList& list) {
  if (!__any_sync(0xffffffffu, height > 0)) return;
  int end = height;
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, end, offset);
    if (threadIdx.x % kWarpSize >= offset) end += other;
  }
  const int total = __shfl_sync(0xffffffffu, end, kWarpSize - 1);
  list.reserve(total);
  for (int at = 0; at < height; ++at) {
    const unsigned entry = stacks[at][threadIdx.x];
    const int index = entry % kTileElements;
    const float distance = (__uint_as_float(entry - index) + low) * unscale;
    list.put(end - height + at, __float_as_uint(fmaxf(distance, 0.0f)),
             first_i + element_row(index), first_j + element_column(index));
  }
  list.next += total;
  list.left -= total;
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// gridDim: groups of tiles i, every share.count-th from share.index on; splits of the tiles j that
// those take.
template <int dim>
__global__ void __launch_bounds__(CountShape<dim>::threads, 1)
    svgd_tensor_count(const __grid_constant__ BracketTask task) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = CountShape<dim>;
  extern __shared__ char memory[];
  auto& shared = *reinterpret_cast<CountRingShared<dim>*>(memory);
  BracketState& state = *task.state;
  if (state.by_products == 0) return;
  const auto tiles = static_cast<int>(task.split.padded_count / kSplitTile);
  const int first_i =
      (static_cast<int>(blockIdx.x) * task.share.count + task.share.index) * Shape::groups;
  const auto group = static_cast<int>(threadIdx.x / kWarpgroupSize);
  const int tile_i = first_i + group;
  const int query_tile = tile_i < tiles ? tile_i : tiles - 1;
  // Counted from first_i; the last group's own tiles end last.
  const int half = tiles / 2;
  const int all = half + Shape::groups;
  const int begin = static_cast<int>(int64_t{all} * blockIdx.y / gridDim.y);
  const int end = static_cast<int>(int64_t{all} * (blockIdx.y + 1) / gridDim.y);
  const CountSource<Shape> source{task.split, first_i + begin, tiles};
  Ring<Shape, CountSource<Shape>> ring{source, shared, (end - begin) * Shape::chunks};
  ring.start(task.split.slots + int64_t{query_tile} * Shape::chunks * Shape::slot_size);

  const float low = state.low;
  const unsigned width = __float_as_uint(state.width);
  const float unscale = 1 / task.split.scale[0] / task.split.scale[0];
  const float* norms = task.split.norms + int64_t{query_tile} * kSplitTile;
  const float norms_i[2] = {norms[element_row(0)], norms[element_row(2)]};
  // As an offset from the start of shared memory: a pointer costs twice the instructions.
  const auto bottom =
      static_cast<unsigned>(reinterpret_cast<char*>(&shared.stacks[0][threadIdx.x]) - memory);
  constexpr unsigned entry_bytes = sizeof(shared.stacks[0]);
  WarpList list{task};
  Count below = 0;
  barrier_wait(&shared.query_full, 0);
  for (int step = begin; step < end; ++step) {
    float products[kTileElements];
    ring.multiply_coordinates(products);
    const int tile_j = source.tile((step - begin) * Shape::chunks);
    const float* norms_j = task.split.norms + int64_t{tile_j} * kSplitTile;
    const int offset = step - group;
    if (offset == 0) {
#pragma unroll
      for (int index = 0; index < kTileElements; ++index) {
        if (element_row(index) >= element_column(index)) products[index] = -INFINITY;
      }
    }
    // Tiles before and after its own share pass by a group, and opposite tiles of an even number
    // meet twice: infinite distances count for nothing. A branch around the products would make the
    // compiler wait after each.
    const bool owned = tile_i < tiles && offset >= 0 && offset <= half &&
                       !(tiles % 2 == 0 && offset == half && tile_i >= half);
    const float above_low[2] = {owned ? norms_i[0] - low : INFINITY,
                                owned ? norms_i[1] - low : INFINITY};
    unsigned tile_below = 0;
    unsigned top = bottom;
#pragma unroll
    for (int first = 0; first < kTileElements; first += 4) {
      const auto norm = load_pair(norms_j + element_column(first));
#pragma unroll
      for (int index = first; index < first + 4; ++index) {
        const float from_low =
            fmaf(products[index], -2.0f, above_low[index / 2 % 2] + norm.value[index % 2]);
        const unsigned bits = __float_as_uint(from_low);
        tile_below += bits >> 31;
        if (bits <= width) {
          *reinterpret_cast<unsigned*>(memory + top) = stack_entry(bits, index);
          top += entry_bytes;
        }
      }
    }
    below += tile_below;
    flush_stacks(shared.stacks, static_cast<int>((top - bottom) / entry_bytes), tile_i * kSplitTile,
                 tile_j * kSplitTile, low, unscale, list);
  }
  list.close();
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    below += __shfl_xor_sync(0xffffffffu, below, offset);
  }
  if (threadIdx.x % kWarpSize == 0) atomicAdd(&state.products.below, below);
#else
  __trap();  // the launcher chooses this kernel on sm_90 only, for which 9.0a is compiled
#endif
}

}  // namespace fused_ops
