// SPDX-License-Identifier: BSD-3-Clause
#include <map>
#include <mutex>
#include <tuple>

#include "triplet/triplet_guess.h"

namespace fused_ops {
namespace {

// Calls with these in common are likely to be one place in the user's program; margins and batch
// sizes may change from step to step. The stream is named by its id, since a handle may return.
using Key = std::tuple<int, unsigned long long, ScalarType, Norm, bool, Reduction, bool, int64_t>;

}  // namespace

int triplet_guess_place(const TripletForward& params, int device, cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<Key, int> places;
  static int next = 1;

  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  unsigned long long stream_id = 0;
  if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess) return 0;
  const bool captured = capture != cudaStreamCaptureStatusNone;
  if (!captured && cudaStreamGetId(stream, &stream_id) != cudaSuccess) return 0;
  const TripletInputs& in = params.inputs;
  const Key key{
      device, stream_id, in.type, in.norm, in.swap, params.reduction, params.accumulate_loss,
      in.dim};

  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto known = places.find(key); !captured && known != places.end()) {
    return known->second;
  }
  if (next == kTripletGuesses) return 0;
  if (!captured) places.emplace(key, next);
  return next++;
}

}  // namespace fused_ops
