// SPDX-License-Identifier: BSD-3-Clause
// The bandwidth and the SVGD update of few particles in one cooperative launch.
//
// With up to 2048 particles a call is bound by latency, not by work: every kernel boundary and
// every barrier counts. Here each block computes one tile of distances once, keeps it in registers
// while the grid finds the median, and turns it into weights: three barriers in all on ordinary
// data, two for the median and one before the tiles' sums are added in a fixed order. With a given
// bandwidth only the last is left.

#pragma once

#include "svgd/svgd_small_phi.cuh"
#include "svgd/svgd_small_select.cuh"

namespace fused_ops {

struct SmallTask {
  SvgdUpdate update;
  int bands;
  bool select;  // whether the bandwidth comes from the median rather than from `update`
  bool apply;   // whether phi is wanted
  BandwidthRule rule;
  double divisor;  // of the rule
  MedianRanks ranks;
  SmallMedianScratch* median;  // for `select`
  double* partial_means;       // one per block, for `select`
  float* partial;              // (bands, count, dim), for `apply`
  float* bandwidth;            // receives the bandwidth, or null
};

template <int size>
struct SmallSearchShared {
  SmallCoordinates<size> coordinates;
  SmallSelectShared select;
};

template <int size>
struct SmallShared {
  union {
    SmallSearchShared<size> search;
    SmallPhiShared<size> phi;
  };
  float bandwidth;
};

// Finds the tile's distances and, from the median of all, the bandwidth.
template <int size>
__device__ inline float small_median_bandwidth(const SmallTask& task, const SmallTile& tile,
                                               SmallFetch<size>& fetch, SmallShared<size>& shared,
                                               SmallDistances<size>& distances) {
  const SvgdParticles& particles = task.update.particles;
  SmallSelectShared& select = shared.search.select;
  constexpr int threads = SmallShape<size>::threads;
  SmallSample sample;
  sample.load(particles);
  clear_scratch<threads>(task.median);
  clear_histogram<threads>(select.window, kWindowBins);
  clear_histogram<threads>(select.histogram, kSmallBins);
  sample.sum(select.columns);
  GridToken waiting;
  small_distances(particles, tile, fetch, shared.search.coordinates, distances, [&] {
    // Earlier, it would have to wait until the scratch is clear.
    waiting = cooperative_groups::this_grid().barrier_arrive();
  });
  const KeyRange window = window_around(estimate_median(sample, particles.dim, select.columns));
  count_window(distances, window, select.window);
  const MedianRanks& ranks = task.ranks;
  const bool zero = ranks.lower < 0;  // the lower one is a zero of the diagonal
  MiddleDistances middle =
      select_distances(distances, window, zero ? 0u : static_cast<unsigned>(ranks.lower),
                       !zero && ranks.upper > ranks.lower, std::move(waiting), task.median, select);
  if (zero && middle.lower == middle.lower) {
    if (ranks.upper < 0) middle.upper = 0;
    middle.lower = 0;
  }
  double mean = 0;
  if (middle.upper == 0) {
    mean = mean_distance(distances, particles.count, task.partial_means, select);
  }
  if (threadIdx.x == 0) {
    shared.bandwidth =
        bandwidth_by_divisor<float>(task.rule, task.divisor, middle.lower, middle.upper, mean);
  }
  __syncthreads();
  return shared.bandwidth;
}

// Adds up the tiles' sums, `width` neighbouring elements to a thread.
template <int threads, int width>
__device__ inline void add_partial(const SmallTask& task) {
  const SvgdUpdate& update = task.update;
  const int dim = static_cast<int>(update.particles.dim);
  const int size = static_cast<int>(update.particles.count) * dim;
  const float share = 1.0f / static_cast<float>(update.particles.count);
  const int step = gridDim.x * threads * width;
  for (int index = (blockIdx.x * threads + threadIdx.x) * width; index < size; index += step) {
    const float* part = task.partial + index;
    Vector<float, width> parts[kMaxBands];  // all loads under way at once
#pragma unroll
    for (int band = 0; band < kMaxBands; ++band) {
      parts[band] = {};
      if (band < task.bands) parts[band] = load<width>(part);
      part += size;
    }
    float sums[width] = {};
#pragma unroll
    for (int band = 0; band < kMaxBands; ++band) {
#pragma unroll
      for (int i = 0; i < width; ++i) sums[i] += parts[band].value[i];
    }
#pragma unroll
    for (int i = 0; i < width; ++i) sums[i] *= share;
    if (update.step) {
      const int row = index / dim;
      const auto* x = static_cast<const float*>(update.particles.data) +
                      row * update.particles.stride + (index - row * dim);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        sums[i] = x[i] + static_cast<float>(update.step_size) * sums[i];
      }
    }
#pragma unroll
    for (int i = 0; i < width; ++i) {
      static_cast<float*>(update.result)[index + i] = sums[i];
    }
  }
}

template <int size, SteinKernel kernel>
__global__ void __launch_bounds__(SmallShape<size>::threads, 1)
    svgd_small(const __grid_constant__ SmallTask task) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<SmallShared<size>*>(memory);
  const SvgdUpdate& update = task.update;
  const SmallTile tile = small_tile(blockIdx.x, task.bands);
  SmallFetch<size> fetch;
  fetch.load(update.particles, tile, 0);
  SmallDistances<size> distances;
  float bandwidth;
  if (task.select) {
    bandwidth = small_median_bandwidth(task, tile, fetch, shared, distances);
    if (task.bandwidth != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
      *task.bandwidth = bandwidth;
    }
    if (!task.apply) return;
  } else {
    small_distances(update.particles, tile, fetch, shared.search.coordinates, distances,
                    [] { __syncthreads(); });
    bandwidth = bandwidth_value(update);
  }
  small_phi<kernel>(update, tile, distances, bandwidth, task.partial, shared.phi);
  cooperative_groups::this_grid().sync();
  constexpr int threads = SmallShape<size>::threads;
  if (update.particles.dim % 2 == 0 &&
      gridDim.x * threads * 2 <= update.particles.count * update.particles.dim) {
    add_partial<threads, 2>(task);
  } else {
    add_partial<threads, 1>(task);
  }
}

}  // namespace fused_ops
