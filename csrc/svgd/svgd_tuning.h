// SPDX-License-Identifier: BSD-3-Clause
// How the CUDA kernels of SVGD are launched: a policy as data, and pure functions that choose it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "common/ceil_div.h"
#include "common/device_limits.h"
#include "svgd/svgd.h"

#ifndef FUSED_OPS_ARCHITECTURES
#define FUSED_OPS_ARCHITECTURES ""
#endif

namespace fused_ops {

// Which kernels form a call.
enum class SvgdForm : int8_t {
  automatic = -1,
  small = 0,     // few particles: one cooperative launch
  tiles = 1,     // tiles of distances, kept or computed in each pass; any dtype
  direct = 2,    // many particles: direct differences, the median by a bracket
  products = 3,  // many particles: products on tensor cores where the data allow them
  missed = 4,    // direct, with a bracket that misses the median; for tests
};
constexpr const char* kSvgdForms[] = {"small", "tiles", "direct", "products", "missed"};
constexpr int kSvgdFormCount = 5;

// The tiles of one of the median's passes.
struct CountPolicy {
  int patch;   // pairs to a thread along each side of a tile: 2 or 4
  int blocks;  // each takes every blocks-th tile
};

// How the median of many particles is bracketed.
struct BracketPolicy {
  int64_t sample_size;  // 0: there is no bracket, the radix passes do it all
  double half_width;    // of the bracket, as a share of the pairs
  double offset;      // of its middle from the median, as such a share: 0 but for SvgdForm::missed
  int64_t capacity;   // of the list of pairs inside
  double most_doubt;  // that distances may leave, as a share of the bracket
  bool tensor_cores;
  int splits;  // of a block's tiles on tensor cores
};

struct SvgdPolicy {
  bool store_distances;     // keep an (N, N) matrix rather than compute distances in each pass
  CountPolicy first_count;  // of the pass that may fill the matrix
  CountPolicy count;        // of the others
  BracketPolicy bracket;
  int chunk;                // dimensions that a block of the update owns
  int64_t tiles_per_split;  // tiles of particles j that a block of the update walks over
  int splits;               // how many blocks share the particles j
};

// How the streamed update shares the particles j among blocks.
struct StreamPolicy {
  bool tensor_cores;
  int splits;  // of the kernel on tensor cores
  int tiles_per_split;
  int direct_splits;
  int64_t direct_tiles_per_split;
  int direct_chunk;  // dimensions of the result that a block of the direct kernel owns
};

// In few dimensions phi is a small difference of large sums, which wants the digits of direct
// differences (H200, Gaussian, 65536 x 2: 5e-5 on tensor cores; 65536 x 16: 1e-5); and there is
// nothing to multiply.
constexpr int64_t kLeastTensorDim = 16;
constexpr int64_t kMostTensorDim = 256;

// wgmma is in code for compute capability 9.0a alone.
inline bool has_tensor_kernels(const DeviceLimits& limits) {
  return limits.capability == 90 &&
         std::string_view(FUSED_OPS_ARCHITECTURES).find("9.0a") != std::string_view::npos;
}

// Dimensions that tensor cores see, the others zero.
constexpr int64_t padded_dim(int64_t dim) {
  return dim <= 16 ? 16 : dim <= 32 ? 32 : ceil_div(dim, 64) * 64;
}

// Warpgroups, of 64 particles i each, that share the particles j in a block on tensor cores.
constexpr int stream_groups(int64_t padded_dim) { return padded_dim <= 64 ? 3 : 2; }
constexpr int count_groups(int64_t padded_dim) { return padded_dim <= 64 ? 4 : 2; }
// Places of the list that each warp of a block on tensor cores reserves at a time.
constexpr int kListChunk = 128;

// Particles i and j of a tile of the direct update.
constexpr int kDirectTile = 128;
constexpr int kDirectSource = 64;

// Shared memory of a block that counts direct distances: two tiles of coordinates and, with several
// blocks of dimensions, the sums of the last ones.
constexpr int direct_count_shared(int64_t dim) { return (dim > kDimBlock ? 98 : 34) * 1024; }

// Splits of `tiles` that fill `places` with `blocks` blocks a split in as few waves as possible:
// from `least` to 8, for the memory of their sums, and each of 4 tiles or more, for their start.
inline int choose_splits(int64_t tiles, int64_t blocks, int64_t places, int least) {
  int best = least;
  double best_time = 0;
  for (int splits = least; splits <= 8; ++splits) {
    const int64_t tiles_per_split = ceil_div(tiles, splits);
    if (splits > least && tiles_per_split < 4) break;
    // A block costs its tiles and about one more.
    const double time = static_cast<double>(ceil_div(blocks * splits, places)) *
                        static_cast<double>(tiles_per_split + 1);
    if (splits == least || time < 0.97 * best_time) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

// A split's sum in float32 loses digits with its length, hence 128 tiles at most while the 8 last.
inline int choose_sum_splits(int64_t tiles, int64_t blocks, int64_t places) {
  return choose_splits(tiles, blocks, places,
                       static_cast<int>(std::min<int64_t>(ceil_div(tiles, 128), 8)));
}

// The bracket reaches five deviations of the median's rank in the sample, sqrt(size) / 2, to either
// side. A larger sample costs its distances, and saves as many times its size in the list.
// `shares` is among how many processes the pairs are divided. Each may meet most of those inside.
inline BracketPolicy choose_bracket_policy(int64_t count, int64_t dim, int shares,
                                           const DeviceLimits& limits) {
  constexpr int64_t least = int64_t{1} << 16;
  constexpr int64_t most = int64_t{1} << 25;
  BracketPolicy policy{};
  const double pairs = 0.5 * static_cast<double>(count) * static_cast<double>(count - 1);
  if (limits.shared_memory < direct_count_shared(dim)) return policy;
  policy.tensor_cores =
      has_tensor_kernels(limits) && dim >= kLeastTensorDim && dim <= kMostTensorDim;
  const int64_t tiles = ceil_div(count, 128) * 2;
  const int groups = count_groups(padded_dim(dim));
  const int64_t blocks = ceil_div(ceil_div(tiles, groups), shares);
  policy.splits = choose_splits(tiles / 2 + groups, blocks, limits.multiprocessors, 1);
  const int64_t reserved =
      policy.tensor_cores ? blocks * policy.splits * groups * 4 * kListChunk : 0;
  const int64_t entry = policy.tensor_cores ? 12 : 4;              // bytes
  const int64_t allowed = (int64_t{56} << 20) + 48 * count * dim;  // bytes
  for (int64_t size = least; size <= most; size *= 2) {
    if (size < most && size * 4096 < least * count) continue;
    policy.half_width = 5 / (2 * std::sqrt(static_cast<double>(size)));
    // A quarter more than expected for the chance in what is inside; the rest is for distances with
    // an error, which widen the bracket.
    const double inside = 2 * policy.half_width * pairs;
    const double places = static_cast<double>((allowed - 4 * size) / entry - reserved - 65536);
    const double slack = std::min(places / inside, 2.5);
    if (slack < 1.75) continue;  // the error of distances wants some of it
    policy.sample_size = size;
    policy.capacity = static_cast<int64_t>(slack * inside) + 65536 + reserved;
    policy.most_doubt = slack - 1.25;
    break;
  }
  return policy;
}

// `rows` is how many results are wanted, `single` whether the accumulation type is float32;
// `max_chunk` and `source_tile` are what the update's kernel has for the accumulation type.
inline SvgdPolicy choose_svgd_policy(int64_t count, int64_t rows, int64_t dim, int shares,
                                     bool single, int max_chunk, int source_tile,
                                     const DeviceLimits& limits) {
  SvgdPolicy policy{};
  policy.store_distances = count <= kMaxStoredParticles;
  if (single && count > kMaxStoredParticles) {
    policy.bracket = choose_bracket_policy(count, dim, shares, limits);
  }

  const auto count_policy = [&](int patch) {
    const int64_t edge = ceil_div(count, 16 * patch);
    const int64_t tiles = edge * (edge + 1) / 2;
    return CountPolicy{patch,
                       static_cast<int>(std::min<int64_t>(tiles, limits.multiprocessors * 4))};
  };
  // Small tiles give every multiprocessor several blocks, whose latencies overlap; large ones load
  // fewer coordinates for each pair. H200, whole median: 256 x 64 23.5 us against 37.8, 1024 x 32
  // 31.6 against 35.4, but 2048 x 64 121 against 92.
  policy.first_count = count_policy(count <= 1024 ? 2 : 4);
  policy.count = count_policy(4);

  policy.chunk = 4;
  for (const int chunk : {16, 32, 64}) {
    if (policy.chunk < dim && chunk <= max_chunk) policy.chunk = chunk;
  }
  // Two blocks for each multiprocessor, where the particles i and the chunks give fewer.
  const int64_t blocks = ceil_div(rows, 64) * ceil_div(dim, policy.chunk);
  const int64_t tiles = ceil_div(count, source_tile);
  const int64_t wanted = std::clamp<int64_t>(2 * limits.multiprocessors / blocks, 1, tiles);
  policy.tiles_per_split = ceil_div(tiles, wanted);
  policy.splits = static_cast<int>(ceil_div(tiles, policy.tiles_per_split));
  return policy;
}

inline StreamPolicy choose_stream_policy(int64_t count, int64_t rows, int64_t dim,
                                         SteinKernel kernel, Precision precision,
                                         const DeviceLimits& limits) {
  StreamPolicy policy{};
  const int64_t least_dim = precision == Precision::medium ? 1 : kLeastTensorDim;
  policy.tensor_cores = has_tensor_kernels(limits) && precision != Precision::highest &&
                        kernel == SteinKernel::rbf && dim >= least_dim && dim <= kMostTensorDim;
  const int64_t tiles = ceil_div(count, 128) * 2;
  const int64_t groups = stream_groups(padded_dim(dim));
  // Rows may begin and end within a tile.
  const int64_t own = rows == count ? tiles : rows / 64 + 2;
  const int splits = choose_sum_splits(tiles, ceil_div(own, groups), limits.multiprocessors);
  policy.tiles_per_split = static_cast<int>(ceil_div(tiles, splits));
  policy.splits = static_cast<int>(ceil_div(tiles, policy.tiles_per_split));

  policy.direct_chunk = 4;
  for (const int chunk : {16, 32, 64}) {
    if (policy.direct_chunk < dim) policy.direct_chunk = chunk;
  }
  const int64_t sources = ceil_div(count, kDirectSource);
  const int64_t blocks = ceil_div(rows, kDirectTile) * ceil_div(dim, policy.direct_chunk);
  const int direct_splits = choose_sum_splits(sources, blocks, 2 * limits.multiprocessors);
  policy.direct_tiles_per_split = ceil_div(sources, direct_splits);
  policy.direct_splits = static_cast<int>(ceil_div(sources, policy.direct_tiles_per_split));
  return policy;
}

// The forms of the median and of the update. `small` is whether the one launch takes the particles.
inline SvgdForm choose_median_form(const SvgdPolicy& policy, bool small) {
  if (small) return SvgdForm::small;
  if (policy.bracket.sample_size == 0) return SvgdForm::tiles;
  return policy.bracket.tensor_cores ? SvgdForm::products : SvgdForm::direct;
}

inline SvgdForm choose_update_form(int64_t count, bool single, const StreamPolicy& policy,
                                   bool small) {
  if (small) return SvgdForm::small;
  if (!single || count <= kMaxStoredParticles) return SvgdForm::tiles;
  return policy.tensor_cores ? SvgdForm::products : SvgdForm::direct;
}

}  // namespace fused_ops
