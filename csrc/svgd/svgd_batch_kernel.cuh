// SPDX-License-Identifier: BSD-3-Clause
// The bandwidth and the SVGD update of many small independent problems in one launch, a block to a
// problem.
//
// A block keeps its particles, scores and the distances of all pairs i < j in shared memory. It
// finds the median bit by bit: how many keys are below the bits found so far with the next one set
// says whether that belongs to them. 31 passes over a few thousand keys in shared memory take less
// than a histogram that has to be cleared and scanned, and nothing is written by two threads.

#pragma once

#include "common/device/reduce.cuh"
#include "svgd/svgd_device.cuh"
#include "svgd/svgd_formula.h"
#include "svgd/svgd_median_kernel.cuh"

namespace fused_ops {

struct BatchTask {
  SvgdUpdate first;  // problem 0; the others lie behind it
  bool select;       // whether the bandwidth comes from the median
  bool apply;        // whether phi is wanted
  BandwidthRule rule;
  double divisor;  // of the rule
  MedianRanks ranks;
  void* bandwidths;  // receives one for each problem, or null
};

// Rows of particles in shared memory stand on different banks.
constexpr int batch_stride(int dim) { return dim | 1; }
constexpr int batch_pairs(int count) { return count * (count - 1) / 2; }

// Elements of shared memory: particles, scores, distances.
constexpr int64_t batch_elements(int64_t count, int64_t dim) {
  return 2 * count * (dim | 1) + count * (count - 1) / 2;
}

// Where the pair is among the pairs i < j, whichever of the two comes first.
__device__ inline int pair_index(int i, int j) {
  const int high = i > j ? i : j;
  const int low = i > j ? j : i;
  return high * (high - 1) / 2 + low;
}

template <typename T>
__device__ inline void load_problem(const void* matrix, int64_t stride, int count, int dim,
                                    T* shared) {
  const auto* source = static_cast<const T*>(matrix);
  for (int index = threadIdx.x; index < count * dim; index += kTileThreads) {
    const int row = index / dim;
    const int column = index - row * dim;
    shared[row * batch_stride(dim) + column] = source[row * stride + column];
  }
}

// The squared distance with the bits of tile_distances.
template <typename T>
__device__ inline T row_distance(const T* x, const T* y, int dim) {
  T distance = 0;
  for (int d = 0; d < dim; d += kDimBlock) {
    const int end = d + kDimBlock < dim ? d + kDimBlock : dim;
    T sum = 0;
    for (int k = d; k < end; ++k) {
      const T difference = x[k] - y[k];
      sum = fma(difference, difference, sum);
    }
    distance += sum;
  }
  return distance;
}

// How many of a block's values satisfy `test`, in every thread.
template <typename T, typename Test>
__device__ inline int count_where(const T* values, int size, Test test, int* shared) {
  int count = 0;
  for (int index = threadIdx.x; index < size; index += kTileThreads) count += test(values[index]);
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    count += __shfl_xor_sync(0xffffffffu, count, mask);
  }
  __syncthreads();  // until the last count is read
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = count;
  __syncthreads();
  count = 0;
  for (int warp = 0; warp < kTileThreads / kWarpSize; ++warp) count += shared[warp];
  return count;
}

template <typename T>
struct BatchShared {
  int counts[kTileThreads / kWarpSize];
  Sum<double> sums[kTileThreads / kWarpSize];
  T bandwidth;
};

// The smallest distance above `value`, infinity if there is none; by the whole block.
template <typename T>
__device__ inline T next_distance(const T* distances, int size, T value, BatchShared<T>& shared) {
  // As a search for the largest complement, whose bits are those of the smallest distance.
  using Key = typename DistanceKey<T>::type;
  Key found = 0;
  for (int bit = static_cast<int>(sizeof(T)) * 8 - 2; bit >= 0; --bit) {
    const Key below = found | (Key{1} << bit);
    const auto test = [&](T distance) {
      return distance > value && DistanceKey<T>::of(distance) < below;
    };
    if (count_where(distances, size, test, shared.counts) == 0) found = below;
  }
  return DistanceKey<T>::value(found);
}

template <typename T>
__device__ inline T batch_bandwidth(const BatchTask& task, const T* distances, int count,
                                    BatchShared<T>& shared) {
  using Key = typename DistanceKey<T>::type;
  const int pairs = batch_pairs(count);
  const MedianRanks& ranks = task.ranks;
  const auto rank = static_cast<int>(ranks.lower >= 0 ? ranks.lower : ranks.upper);
  T lower = 0, upper = 0;
  if (rank >= 0) {
    Key key = 0;
    for (int bit = static_cast<int>(sizeof(T)) * 8 - 2; bit >= 0; --bit) {
      const Key with_bit = key | (Key{1} << bit);
      const auto test = [&](T distance) { return DistanceKey<T>::of(distance) < with_bit; };
      if (count_where(distances, pairs, test, shared.counts) <= rank) key = with_bit;
    }
    const T value = DistanceKey<T>::value(key);
    lower = ranks.lower < 0 ? T(0) : value;
    upper = ranks.upper < 0 ? T(0) : value;
    if (mean_of_two(ranks)) {
      const auto up_to = [&](T distance) { return distance <= value; };
      if (count_where(distances, pairs, up_to, shared.counts) <= rank + 1) {
        upper = next_distance(distances, pairs, value, shared);
      }
    }
  }
  const auto is_nan = [](T distance) { return distance != distance; };
  if (count_where(distances, pairs, is_nan, shared.counts) > 0) {
    lower = upper = std::numeric_limits<T>::quiet_NaN();
  }
  Sum<double> sum;
  if (upper == T(0)) {  // the same for every thread
    for (int pair = threadIdx.x; pair < pairs; pair += kTileThreads) sum.value += distances[pair];
    sum = reduce_group(sum, kTileThreads, shared.sums);
  }
  if (threadIdx.x == 0) {
    shared.bandwidth = bandwidth_by_divisor<T>(task.rule, task.divisor, lower, upper,
                                               pairs > 0 ? sum.value / pairs : 0.0);
  }
  __syncthreads();
  return shared.bandwidth;
}

// Turns distances into K_ij in place.
template <SteinKernel kernel, typename T>
__device__ inline void batch_weights(const KernelScale<T>& scale, int pairs, T* distances) {
  for (int pair = threadIdx.x; pair < pairs; pair += kTileThreads) {
    const T u = distances[pair] * scale.half_inverse;
    distances[pair] = kernel == SteinKernel::rbf ? exp(-u) : T(1) / sqrt(T(1) + u);
  }
}

// sum_j K_ij s_j + G_ij (x_i - x_j) in the order of j, an element to a thread.
template <SteinKernel kernel, typename T>
__device__ inline void batch_phi(const SvgdUpdate& update, const T* particles, const T* score,
                                 const T* weights, T repulsion) {
  const auto count = static_cast<int>(update.particles.count);
  const auto dim = static_cast<int>(update.particles.dim);
  const int stride = batch_stride(dim);
  for (int index = threadIdx.x; index < count * dim; index += kTileThreads) {
    const int i = index / dim;
    const int d = index - i * dim;
    const T x = particles[i * stride + d];
    T sum = score[i * stride + d] + (x - x);  // of particle i itself: K is 1, or NaN where x is
    for (int j = 0; j < count; ++j) {
      if (j == i) continue;
      const T k = weights[pair_index(i, j)];
      const T g = kernel == SteinKernel::rbf ? k * repulsion : k * k * k * repulsion;
      sum = fma(k, score[j * stride + d], sum);
      sum = fma(g, x - particles[j * stride + d], sum);
    }
    T value = sum / static_cast<T>(count);
    if (update.step) value = fma(static_cast<T>(update.step_size), value, x);
    static_cast<T*>(update.result)[index] = value;
  }
}

// A block to a problem.
template <typename T, SteinKernel kernel>
__global__ void __launch_bounds__(kTileThreads) svgd_batch(const __grid_constant__ BatchTask task) {
  extern __shared__ uint4 memory[];
  __shared__ BatchShared<T> shared;
  const SvgdUpdate update = nth_problem(task.first, blockIdx.x);
  const auto count = static_cast<int>(update.particles.count);
  const auto dim = static_cast<int>(update.particles.dim);
  const int stride = batch_stride(dim);
  const int pairs = batch_pairs(count);
  T* particles = reinterpret_cast<T*>(memory);
  T* score = particles + count * stride;
  T* distances = score + count * stride;
  load_problem(update.particles.data, update.particles.stride, count, dim, particles);
  if (task.apply) load_problem(update.score, update.score_stride, count, dim, score);
  __syncthreads();
  for (int pair = threadIdx.x; pair < pairs; pair += kTileThreads) {
    int64_t i, j;  // triangle_tile counts the diagonal too
    triangle_tile(pair, i, j);
    distances[pair] = row_distance(particles + (i + 1) * stride, particles + j * stride, dim);
  }
  __syncthreads();
  const T bandwidth =
      task.select ? batch_bandwidth(task, distances, count, shared) : bandwidth_value<T>(update);
  if (task.bandwidths != nullptr && threadIdx.x == 0) {
    static_cast<T*>(task.bandwidths)[blockIdx.x] = bandwidth;
  }
  if (!task.apply) return;
  const KernelScale<T> scale(kernel, bandwidth, static_cast<T>(update.repulsion));
  batch_weights<kernel>(scale, pairs, distances);
  __syncthreads();
  batch_phi<kernel>(update, particles, score, distances, scale.repulsion);
}

}  // namespace fused_ops
