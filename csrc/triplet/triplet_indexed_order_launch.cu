// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "common/ceil_div.h"
#include "triplet/triplet_indexed_launch.h"

namespace fused_ops {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1 << 16;

__global__ void triplet_indexed_keys(const __grid_constant__ TripletInputs in,
                                     TripletEntryBits bits, uint64_t* keys) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t entry = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; entry < 3 * in.rows;
       entry += threads) {
    keys[entry] = bits.key(entry_row(in, entry), entry);
  }
}

}  // namespace

cudaError_t launch_triplet_indexed_order(const TripletInputs& in, uint64_t* unsorted,
                                         uint64_t* order, void* scratch, size_t& scratch_bytes,
                                         cudaStream_t stream) {
  const TripletEntryBits bits(in);
  const int64_t entries = 3 * in.rows;
  if (scratch != nullptr) {
    const int64_t blocks = std::min(ceil_div(entries, int64_t{kThreads}), kMostBlocks);
    triplet_indexed_keys<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(in, bits,
                                                                                 unsorted);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cub::DeviceRadixSort::SortKeys(scratch, scratch_bytes, unsorted, order, entries,
                                        bits.entry, bits.entry + bits.row, stream);
}

}  // namespace fused_ops
