// SPDX-License-Identifier: BSD-3-Clause
// Reductions over a group of threads in a fixed order, so that a result repeats bit for bit.
//
// A group is `size` neighbouring threads: a power of two up to a warp, or the whole block. A value
// is any type with a commutative `merge(other)` and an overload of `shuffle_xor(value, mask)`.

#pragma once

namespace fused_ops {

constexpr int kWarpSize = 32;

template <typename T>
struct Sum {
  T value{};
  __device__ void merge(const Sum& other) { value += other.value; }
};

template <typename T>
__device__ inline Sum<T> shuffle_xor(const Sum<T>& sum, int mask) {
  return {__shfl_xor_sync(0xffffffffu, sum.value, mask)};
}

// Of non-negative floats by their bits, which order alike with NaN above infinity; or of any keys.
struct Maximum {
  unsigned bits = 0;
  __device__ void merge(const Maximum& other) { bits = other.bits > bits ? other.bits : bits; }
};

__device__ inline Maximum shuffle_xor(const Maximum& maximum, int mask) {
  return {__shfl_xor_sync(0xffffffffu, maximum.bits, mask)};
}

// The merged value, in every thread of its group and with the same bits. All threads of the block
// must call it; `shared` holds one value per warp and is used only by groups wider than a warp.
template <typename Value>
__device__ Value reduce_group(Value value, int size, Value* shared) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    if (mask < size) value.merge(shuffle_xor(value, mask));
  }
  if (size > kWarpSize) {
    const int warps = size / kWarpSize;
    __syncthreads();  // until the last reduction's values are read
    if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    value = shared[0];
    for (int warp = 1; warp < warps; ++warp) value.merge(shared[warp]);
  }
  return value;
}

}  // namespace fused_ops
