// SPDX-License-Identifier: BSD-3-Clause
// How a block copies flat memory to shared memory and back, with two stages: while one is worked on
// the other one comes. Both ends of a copy are on 16-byte boundaries.
//
// On Hopper its copy engine does all, which one thread instructs: H200, (65536, 1001) float32
// forward 217 us without and 203 with it. Elsewhere every thread copies.

#pragma once

#include <cuda_pipeline_primitives.h>

#include "common/device/vector.cuh"
#include "common/device/wgmma.cuh"
#include "triplet/triplet_tuning.h"

namespace fused_ops {

// In this order: begin_copies; for each stage begin_fetches, fetch_flat, end_fetches and, once the
// next stage's have begun, wait_for_fetches; then begin_stores, store_flat, end_stores, or nothing;
// end_copies. All threads call them. `arrival` is the stage's, and `phase` how often it has been
// waited for, modulo 2.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ inline void begin_copies(uint64_t* arrivals) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kTripletTileStages; ++stage) barrier_create(&arrivals[stage], 1);
    barriers_created();
  }
  __syncthreads();
}

// The memory that stores were made from is free again.
__device__ inline void await_stores() {
  if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ inline void begin_fetches(uint64_t* arrival, int bytes) {
  await_stores();
  if (threadIdx.x == 0) barrier_expect(arrival, bytes);
}

template <typename scalar>
__device__ inline void fetch_flat(scalar* to, const scalar* from, int size, uint64_t* arrival) {
  if (threadIdx.x == 0 && size > 0) {
    bulk_copy(to, from, size * static_cast<int>(sizeof(scalar)), arrival);
  }
}

__device__ inline void end_fetches() {}

__device__ inline void wait_for_fetches(uint64_t* arrival, int phase) {
  barrier_wait(arrival, phase);
  __syncthreads();  // for what threads have copied themselves
}

__device__ inline void begin_stores() {
  // The copy engine must see what threads have written.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
}

template <typename scalar>
__device__ inline void store_flat(scalar* to, const scalar* from, int size) {
  if (threadIdx.x != 0 || size == 0) return;
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(size * static_cast<int>(sizeof(scalar)))
               : "memory");
}

__device__ inline void end_stores() {
  if (threadIdx.x == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ inline void end_copies() { await_stores(); }

#else

__device__ inline void begin_copies(uint64_t*) {}

__device__ inline void begin_fetches(uint64_t*, int) {}

template <typename scalar>
__device__ inline void fetch_flat(scalar* to, const scalar* from, int size, uint64_t*) {
  constexpr int width = kTripletAccessBytes / sizeof(scalar);
#pragma unroll 4
  for (int i = threadIdx.x * width; i < size; i += blockDim.x * width) {
    __pipeline_memcpy_async(to + i, from + i, kTripletAccessBytes);
  }
}

__device__ inline void end_fetches() { __pipeline_commit(); }

__device__ inline void wait_for_fetches(uint64_t*, int) {
  __pipeline_wait_prior(kTripletTileStages - 1);
  __syncthreads();
}

__device__ inline void begin_stores() { __syncthreads(); }

template <typename scalar>
__device__ inline void store_flat(scalar* to, const scalar* from, int size) {
  constexpr int width = kTripletAccessBytes / sizeof(scalar);
#pragma unroll 4
  for (int i = threadIdx.x * width; i < size; i += blockDim.x * width) {
    Packed<scalar>::load(from + i).store(to + i);
  }
}

__device__ inline void end_stores() {}

__device__ inline void end_copies() {}

#endif

}  // namespace fused_ops
