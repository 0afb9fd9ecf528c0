// SPDX-License-Identifier: BSD-3-Clause
// How tiles of particles pass through a block of warpgroups on Hopper: 64 particles i to each
// warpgroup, in shared memory for good, and the slots of the particles j (svgd_split.h) through a
// ring that all of them read. One thread of the first warpgroup refills the ring `lag` slots behind
// that warpgroup, so that it waits for none of the others unless they are further behind.

#pragma once

#include "common/device/reduce.cuh"
#include "common/device/vector.cuh"
#include "common/device/wgmma.cuh"
#include "svgd/svgd_split.h"

namespace fused_ops {

template <int dim, int groups_, int slots_, int lag_>
struct RingShape {
  static constexpr int groups = groups_;
  static constexpr int slots = slots_;
  static constexpr int lag = lag_;
  static constexpr int width = split_width(dim);
  static constexpr int chunks = dim / width;
  static constexpr int slot_size = split_slot_size(width);
  static constexpr int threads = groups * kWarpgroupSize;
  static_assert(dim % width == 0 && width % kMmaDepth == 0);
  // A warpgroup holds two slots of coordinates while it waits for nothing but its own products.
  static_assert(slots - lag > 2);
};

template <typename Shape>
struct alignas(1024) RingShared {
  __half query[Shape::groups][Shape::chunks][Shape::slot_size];
  __half ring[Shape::slots][Shape::slot_size];
  uint64_t full[Shape::slots];
  uint64_t empty[Shape::slots];
  uint64_t query_full;
};

// Numbers of two particles side by side, which nobody writes meanwhile and many threads read.
__device__ inline Vector<float, 2> load_pair(const float* address) {
  const float2 pair = __ldg(reinterpret_cast<const float2*>(address));
  return {pair.x, pair.y};
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A warpgroup waits for slots at the head and gives them up at the tail. `Source::slot(index)` is
// where in device memory each slot of the stream is.
template <typename Shape, typename Source>
struct Ring {
  Source source;
  RingShared<Shape>& shared;
  int total;         // slots of the stream
  int released = 0;  // by this warpgroup
  int head = 0;
  int tail = 0;
  int parity = 0;  // of the head

  // All threads of the block call it; `query` is the warpgroup's first slot of coordinates.
  __device__ void start(const __half* query) {
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < Shape::slots; ++slot) {
        barrier_create(&shared.full[slot], 1);
        barrier_create(&shared.empty[slot], Shape::threads / kWarpSize);
      }
      barrier_create(&shared.query_full, Shape::groups);
      barriers_created();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int index = 0; index < Shape::slots && index < total; ++index) fill(index);
    }
    if (threadIdx.x % kWarpgroupSize == 0) {
      constexpr int bytes = Shape::chunks * Shape::slot_size * sizeof(__half);
      barrier_expect(&shared.query_full, bytes);
      bulk_copy(shared.query[threadIdx.x / kWarpgroupSize], query, bytes, &shared.query_full);
    }
    __syncwarp();
  }

  __device__ void fill(int index) {
    constexpr int bytes = Shape::slot_size * sizeof(__half);
    uint64_t* full = &shared.full[index % Shape::slots];
    barrier_expect(full, bytes);
    bulk_copy(shared.ring[index % Shape::slots], source.slot(index), bytes, full);
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

  // Gives up the oldest slot; the products with it must be done.
  __device__ void release() {
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

  // products = y_i y_j over all dimensions, as high * low + low * high + high * high: 22 bits of
  // each coordinate.
  __device__ void multiply_coordinates(float (&products)[32]) {
    constexpr int row_bytes = Shape::width * sizeof(__half);
    const auto& query = shared.query[threadIdx.x / kWarpgroupSize];
#pragma unroll
    for (int chunk = 0; chunk < Shape::chunks; ++chunk) {
      const __half* tile = shared.ring[take()];
      const uint64_t i_high = matrix_descriptor<row_bytes>(query[chunk]);
      const uint64_t i_low = matrix_descriptor<row_bytes>(query[chunk] + Shape::slot_size / 2);
      const uint64_t j_high = matrix_descriptor<row_bytes>(tile);
      const uint64_t j_low = matrix_descriptor<row_bytes>(tile + Shape::slot_size / 2);
      mma_begin();
#pragma unroll
      for (int step = 0; step < Shape::width / kMmaDepth; ++step) {
        mma_shared(products, at_depth(i_high, step), at_depth(j_low, step), chunk + step > 0);
        mma_shared(products, at_depth(i_low, step), at_depth(j_high, step), true);
        mma_shared(products, at_depth(i_high, step), at_depth(j_high, step), true);
      }
      mma_commit();
      if (chunk > 0) {
        mma_wait<1>();
        release();
      }
    }
    mma_wait<0>();
    release();
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fused_ops
