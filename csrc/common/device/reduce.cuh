// SPDX-License-Identifier: BSD-3-Clause
// Reductions over a group of threads in a fixed order, so that a result repeats bit for bit.
//
// A group is `size` neighbouring threads: a power of two up to a warp, or the whole block. A value
// is any type with `merge(other)` and an overload of `shuffle_down(value, offset, width)`.

#pragma once

namespace fused_ops {

constexpr int kWarpSize = 32;

template <typename T>
struct Sum {
  T value{};
  __device__ void merge(const Sum& other) { value += other.value; }
};

template <typename T>
__device__ inline Sum<T> shuffle_down(const Sum<T>& sum, int offset, int width) {
  return {__shfl_down_sync(0xffffffffu, sum.value, offset, width)};
}

// The merged value in the first thread of each group. All threads of the block must call it;
// `shared` holds one value per warp and is used only by groups wider than a warp.
template <typename Value>
__device__ Value reduce_group(Value value, int size, Value* shared) {
  const int width = size < kWarpSize ? size : kWarpSize;
  for (int offset = width / 2; offset > 0; offset /= 2) {
    value.merge(shuffle_down(value, offset, width));
  }
  if (size > kWarpSize) {
    const int warps = size / kWarpSize;
    __syncthreads();  // until the last reduction's values are read
    if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
      value = threadIdx.x < warps ? shared[threadIdx.x] : Value{};
      for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
        value.merge(shuffle_down(value, offset, kWarpSize));
      }
    }
  }
  return value;
}

}  // namespace fused_ops
