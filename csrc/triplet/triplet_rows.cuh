// SPDX-License-Identifier: BSD-3-Clause
// How the CUDA kernels of triplet_margin_loss walk along rows.
//
// A row is cut into accesses of 16 bytes. Where rows start and end on 16-byte boundaries every
// access is whole. Elsewhere accesses still start on the boundaries of the anchor's memory, so that
// only the first and the last of a row are partly outside of it. They read what is there, unless
// it is outside of the matrix; elements of gradients are then stored one by one, and those of an
// input that is not off the boundary as the anchor is are loaded so too.

#pragma once

#include <cuda_pipeline_primitives.h>

#include "common/device/reduce.cuh"
#include "common/device/vector.cuh"
#include "triplet/triplet.h"
#include "triplet/triplet_tuning.h"

namespace fused_ops {

// Makes the compiler hold a value that it would work out anew at every use, but still know that an
// address is of global memory.
__device__ inline void keep(unsigned& value) { asm("" : "+r"(value)); }
template <typename scalar>
__device__ inline void keep(const scalar*& address) {
  asm("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
}

// Copies 16 bytes to shared memory if `wanted`, without a branch, by the time that the
// __pipeline_commit() behind it is waited for.
__device__ inline void copy_async(unsigned to, const void* from, bool wanted) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "{ .reg .pred wanted; setp.ne.s32 wanted, %2, 0;"
      "  @wanted cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
#else
  if (wanted) {
    *static_cast<uint4*>(__cvta_shared_to_generic(to)) = *static_cast<const uint4*>(from);
  }
#endif
}

template <typename scalar>
constexpr int kAccessWidth = 16 / sizeof(scalar);

// A part of a row that is short enough for 32-bit offsets, which count from `begin`.
template <typename scalar, bool whole>
struct TripletPart {
  const scalar* anchor;
  const scalar* positive;
  const scalar* negative;
  int64_t begin;  // element of the row, below 0 where the first access starts before it
  int first;      // offsets [first, end) are inside,
  int end;
  int readable_first;  // [readable_first, readable_end) can be read
  int readable_end;

  // The `size` elements from `from` on, as accesses see them: those count from a boundary.
  __device__ TripletPart(const TripletInputs& in, int64_t row, int64_t from, int64_t size)
      : anchor(static_cast<const scalar*>(in.anchor) + row * in.anchor_stride) {
    const int shift = whole ? 0 : reinterpret_cast<uintptr_t>(anchor) % 16 / sizeof(scalar);
    begin = from - shift;
    anchor += begin;
    positive = static_cast<const scalar*>(in.positive) + row * in.positive_stride + begin;
    negative = static_cast<const scalar*>(in.negative) + row * in.negative_stride + begin;
    for (const scalar** input : {&anchor, &positive, &negative}) keep(*input);
    first = begin < 0 ? shift : 0;
    end = static_cast<int>(min(size, in.dim - begin));
    const int64_t stride = min(min(in.anchor_stride, in.positive_stride), in.negative_stride);
    const int64_t behind = (in.rows - 1 - row) * stride;  // elements behind this row, at least
    readable_first = row * stride >= first ? 0 : first;
    readable_end = end + static_cast<int>(min(behind, int64_t{kAccessWidth<scalar>}));
  }

  // Whether any element of the access at `offset` is inside.
  __device__ bool reaches(int offset) const { return offset < end; }
  __device__ bool can_read(int offset) const {
    return whole || (offset >= readable_first && offset + kAccessWidth<scalar> <= readable_end);
  }
  // Whether all are.
  __device__ bool covers(int offset) const {
    return whole || (offset >= first && offset + kAccessWidth<scalar> <= end);
  }
  __device__ bool contains(int offset) const { return whole || (offset >= first && offset < end); }
};

template <typename scalar>
__device__ inline bool on_boundary(const scalar* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

// An access that reaches the part. Elements outside of it may be anything.
template <typename scalar, bool whole>
__device__ inline Packed<scalar> load_access(const TripletPart<scalar, whole>& part,
                                             const scalar* from, int offset) {
  from += offset;
  if (part.can_read(offset) && (whole || on_boundary(from))) return Packed<scalar>::load(from);
  Packed<scalar> access;
#pragma unroll
  for (int i = 0; i < kAccessWidth<scalar>; ++i) {
    if (part.contains(offset + i)) access.set(i, from[i]);
  }
  return access;
}

template <typename scalar, bool whole>
__device__ inline void store_access(const TripletPart<scalar, whole>& part, scalar* to, int offset,
                                    const Packed<scalar>& access) {
  to += offset;
  if (part.covers(offset) && (whole || on_boundary(to))) {
    access.store(to);
  } else {
#pragma unroll
    for (int i = 0; i < kAccessWidth<scalar>; ++i) {
      if (part.contains(offset + i)) to[i] = access.get(i);
    }
  }
}

// Brings an access into shared memory, by the time its stage is waited for, if it reaches the part.
// Elements outside of the part may be anything.
template <typename scalar, bool whole>
__device__ inline void fetch_access(const TripletPart<scalar, whole>& part, const scalar* from,
                                    int offset, unsigned slot) {
  from += offset;
  if constexpr (whole) {
    copy_async(slot, from, part.reaches(offset));
    return;
  }
  if (!part.reaches(offset)) return;
  if (part.can_read(offset) && on_boundary(from)) {
    copy_async(slot, from, true);
    return;
  }
  auto* elements = static_cast<scalar*>(__cvta_shared_to_generic(slot));
#pragma unroll
  for (int i = 0; i < kAccessWidth<scalar>; ++i) {
    if (!part.contains(offset + i)) continue;
    if constexpr (sizeof(scalar) >= 4) {
      __pipeline_memcpy_async(&elements[i], &from[i], sizeof(scalar));
    } else {  // too small for an asynchronous copy
      elements[i] = from[i];
    }
  }
}

// The same elements of the three inputs.
template <typename scalar>
struct TripletAccess {
  Packed<scalar> anchor, positive, negative;

  template <bool whole>
  __device__ void load(const TripletPart<scalar, whole>& part, int offset) {
    anchor = load_access(part, part.anchor, offset);
    positive = load_access(part, part.positive, offset);
    negative = load_access(part, part.negative, offset);
  }
};

// The slots of this thread, which no other one touches. Those of a warp's threads are neighbours,
// so that its accesses spread over all banks.
template <typename scalar>
struct TripletSlots {
  unsigned first;  // in shared memory

  __device__ TripletSlots(uint4* memory, int slots)
      : first(static_cast<unsigned>(__cvta_generic_to_shared(memory))) {
    const int warp = threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    first += (warp * slots * 3 * kWarpSize + lane) * kTripletAccessBytes;
    keep(first);
  }

  __device__ unsigned at(int slot, int input) const {
    return first + (slot * 3 + input) * kWarpSize * kTripletAccessBytes;
  }
  template <bool whole>
  __device__ void fetch(const TripletPart<scalar, whole>& part, int offset, int slot) const {
    fetch_access(part, part.anchor, offset, at(slot, 0));
    fetch_access(part, part.positive, offset, at(slot, 1));
    fetch_access(part, part.negative, offset, at(slot, 2));
  }
  __device__ TripletAccess<scalar> get(int slot) const {
    const auto value = [&](int input) {
      return *static_cast<Packed<scalar>*>(__cvta_shared_to_generic(at(slot, input)));
    };
    return {value(0), value(1), value(2)};
  }
};

}  // namespace fused_ops
