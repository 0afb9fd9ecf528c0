// SPDX-License-Identifier: BSD-3-Clause
// The CUDA ops: arguments, allocation, device guard, current stream, launches.

#include <torch/csrc/stable/library.h>

#include <optional>

#include "common/cuda_launch.h"
#include "svgd/svgd_arguments.h"
#include "svgd/svgd_batch_launch.h"
#include "svgd/svgd_bracket_launch.h"
#include "svgd/svgd_cast.h"
#include "svgd/svgd_forced.h"
#include "svgd/svgd_launch.h"
#include "svgd/svgd_small_launch.h"
#include "svgd/svgd_split.h"
#include "svgd/svgd_stream_launch.h"

namespace fused_ops {
namespace {

// A matrix as the kernels take it: 16-bit elements in a float32 copy.
struct WideMatrix {
  WideMatrix(const Tensor& like, ScalarType type, const void* matrix, int64_t count, int64_t dim,
             int64_t rows_apart, cudaStream_t stream)
      : type(type), data(matrix), stride(rows_apart) {
    if (element_size(type) != 2) return;
    copy = new_tensor(like, {count, dim}, accumulate_dtype(type));
    auto* wide = static_cast<float*>(copy->mutable_data_ptr());
    check_cuda(launch_svgd_widen(type, matrix, count, dim, stride, wide, stream));
    this->type = ScalarType::float32;
    data = wide;
    stride = dim;
  }

  ScalarType type;
  const void* data;
  int64_t stride;
  std::optional<Tensor> copy;
};

// The launches of one call, in their order. Scratch memory may be freed when the call returns: the
// allocator hands it out again on the same stream only.
struct SvgdLaunches {
  SvgdLaunches(const Tensor& like, const SvgdParticles& matrix, int64_t form)
      : context(like),
        tensor(like),
        wide(like, matrix.type, matrix.data, matrix.count, matrix.dim, matrix.stride,
             context.stream),
        particles{wide.type, matrix.count, matrix.dim, wide.data, wide.stride},
        limits(context.limits()),
        small(svgd_small_policy(particles, limits.multiprocessors, limits.shared_memory)),
        policy(svgd_policy(particles, particles.count, 1, limits)),
        forced(svgd_form(form)) {
    force_form(policy, forced, small.bands > 0);
  }

  Tensor scratch(int64_t bytes) const { return new_tensor(tensor, {bytes}, kByte); }

  Tensor bandwidth(BandwidthRule rule) {
    Tensor result = new_tensor(tensor, {}, accumulate_dtype(particles.type));
    if (particles.count == 1) return torch::stable::fill_(result, 1);
    bandwidth(rule, result.mutable_data_ptr());
    return result;
  }

  // Of two particles or more, into an element of the accumulation type.
  void bandwidth(BandwidthRule rule, void* result) {
    const SvgdForm form =
        forced == SvgdForm::automatic ? choose_median_form(policy, small.bands > 0) : forced;
    if (form == SvgdForm::small) {
      const Tensor memory = scratch(svgd_small_bytes(particles, small));
      check_cuda(launch_svgd_small_bandwidth(particles, rule, small, memory.mutable_data_ptr(),
                                             result, context.stream));
    } else if (form == SvgdForm::tiles) {
      if (policy.store_distances) distances = scratch(svgd_distances_bytes(particles));
      const Tensor median = scratch(svgd_median_bytes(policy));
      check_cuda(launch_svgd_bandwidth(particles, rule, policy, data_or_null(distances),
                                       median.mutable_data_ptr(), result, context.stream));
    } else {
      if (policy.bracket.tensor_cores) make_split(true);
      const Tensor memory = scratch(svgd_bracket_bytes(particles, policy, limits));
      check_cuda(launch_svgd_bracket(particles, split, rule, policy, limits,
                                     memory.mutable_data_ptr(), static_cast<float*>(result),
                                     context.stream));
    }
  }

  // With a `rule` the bandwidth is its, else the update's.
  void update(SvgdUpdate update, std::optional<BandwidthRule> rule) {
    const ScalarType type = update.particles.type;
    const WideMatrix score(tensor, type, update.score, particles.count, particles.dim,
                           update.score_stride, context.stream);
    void* const result = update.result;
    std::optional<Tensor> wide_result;
    if (score.copy) {
      wide_result = new_tensor(tensor, {update.rows, particles.dim}, accumulate_dtype(type));
      update.result = wide_result->mutable_data_ptr();
    }
    update.particles = particles;
    update.score = score.data;
    update.score_stride = score.stride;
    update_wide(update, rule);
    if (wide_result) {
      check_cuda(launch_svgd_narrow(type, static_cast<const float*>(update.result),
                                    update.rows * particles.dim, result, context.stream));
    }
  }

 private:
  void update_wide(SvgdUpdate update, std::optional<BandwidthRule> rule) {
    const bool single = particles.type != ScalarType::float64;
    const bool whole = update.rows == particles.count;
    const StreamPolicy stream = choose_stream_policy(particles.count, update.rows, particles.dim,
                                                     update.kernel, update.precision, limits);
    const SvgdForm form =
        forced == SvgdForm::automatic
            ? choose_update_form(particles.count, single, stream, whole && small.bands > 0)
            : forced;
    STD_TORCH_CHECK(whole || form != SvgdForm::small, "form: small takes all rows");
    if (form == SvgdForm::small) {
      const Tensor memory = scratch(svgd_small_bytes(particles, small));
      check_cuda(launch_svgd_small(update, rule ? &*rule : nullptr, small,
                                   memory.mutable_data_ptr(), nullptr, context.stream));
      return;
    }
    std::optional<Tensor> median;
    if (rule) {
      median = bandwidth(*rule);
      update.bandwidth = median->const_data_ptr();
    }
    if (form == SvgdForm::tiles) return update_tiles(update);
    update_streamed(update, stream, form == SvgdForm::products);
  }

  void update_tiles(const SvgdUpdate& update) {
    const bool whole = update.rows == particles.count;
    const SvgdPolicy policy = svgd_policy(particles, update.rows, 1, limits);
    // Each chunk of dimensions would compute them again.
    if (whole && !distances && policy.store_distances && particles.dim > policy.chunk) {
      distances = scratch(svgd_distances_bytes(particles));
      check_cuda(launch_svgd_distances(particles, distances->mutable_data_ptr(), context.stream));
    }
    std::optional<Tensor> partial;
    if (const int64_t bytes = svgd_partial_bytes(update, policy)) partial = scratch(bytes);
    check_cuda(launch_svgd_update(update, policy, whole ? data_or_null(distances) : nullptr,
                                  data_or_null(partial), context.stream));
  }

  void update_streamed(const SvgdUpdate& update, StreamPolicy stream, bool products) {
    stream.tensor_cores &= products;
    make_split(stream.tensor_cores);
    const Tensor sums = scratch(svgd_stream_bytes(update, split, stream));
    check_cuda(launch_svgd_stream(update, split, stream, sums.mutable_data_ptr(), context.stream));
  }

  void make_split(bool with_slots) {
    if (halves && (split.slots != nullptr || !with_slots)) return;
    halves = scratch(svgd_split_bytes(particles, with_slots));
    check_cuda(launch_svgd_split(particles, with_slots, halves->mutable_data_ptr(), split,
                                 context.stream));
  }

  static void* data_or_null(const std::optional<Tensor>& memory) {
    return memory ? memory->mutable_data_ptr() : nullptr;
  }

  CudaContext context;
  Tensor tensor;
  WideMatrix wide;
  SvgdParticles particles;
  DeviceLimits limits;
  SvgdSmallPolicy small;
  SvgdPolicy policy;
  SvgdForm forced;
  std::optional<Tensor> distances;  // once they have been stored
  std::optional<Tensor> halves;     // and these split
  SplitParticles split{};
};

// Several small problems in one launch.
struct SvgdBatch {
  SvgdBatch(const Tensor& like, int64_t problems, const SvgdUpdate& first)
      : problems(problems), tensor(like), first(first) {}

  // Whether they are several, and small. `form` may ask for the kernels of single ones.
  bool takes(int64_t form) const {
    if (problems == 1 || svgd_form(form) != SvgdForm::automatic) return false;
    SvgdParticles wide = first.particles;
    if (element_size(wide.type) == 2) wide.type = ScalarType::float32;
    return svgd_batch_takes(wide, CudaContext(tensor).limits().shared_memory);
  }

  void launch(const std::optional<BandwidthRule>& rule, void* bandwidths) {
    const CudaContext context(tensor);
    const SvgdParticles& particles = first.particles;
    const ScalarType type = particles.type;
    const int64_t rows = problems * particles.count;
    const auto widened = [&](const void* matrix, int64_t stride) {
      return WideMatrix(tensor, type, matrix, rows, particles.dim, stride, context.stream);
    };
    const WideMatrix x = widened(particles.data, particles.stride);
    std::optional<WideMatrix> score;
    SvgdUpdate update = first;
    update.particles = {x.type, particles.count, particles.dim, x.data, x.stride};
    std::optional<Tensor> wide_result;
    if (first.result != nullptr) {
      score.emplace(widened(first.score, first.score_stride));
      update.score = score->data;
      update.score_stride = score->stride;
      if (x.copy) {
        wide_result = new_tensor(tensor, {rows, particles.dim}, accumulate_dtype(type));
        update.result = wide_result->mutable_data_ptr();
      }
    }
    check_cuda(
        launch_svgd_batch(update, problems, rule ? &*rule : nullptr, bandwidths, context.stream));
    if (wide_result) {
      check_cuda(launch_svgd_narrow(type, static_cast<const float*>(update.result),
                                    rows * particles.dim, first.result, context.stream));
    }
  }

  int64_t problems;

 private:
  Tensor tensor;
  SvgdUpdate first;
};

Tensor svgd_bandwidth(Tensor particles, int64_t rule, int64_t form) {
  const Rows rows = svgd_rows(particles);
  Tensor result = new_bandwidth(particles);
  SvgdUpdate first{};
  first.particles = svgd_particles(rows);
  if (first.particles.count == 1) return torch::stable::fill_(result, 1);
  SvgdBatch batch(particles, svgd_problems(particles), first);
  if (batch.takes(form)) {
    batch.launch(bandwidth_rule(rule), result.mutable_data_ptr());
    return result;
  }
  const int64_t size = accumulate_size(first.particles.type);
  auto* bandwidths = static_cast<char*>(result.mutable_data_ptr());
  for (int64_t problem = 0; problem < batch.problems; ++problem) {
    SvgdLaunches(particles, nth_problem(first, problem).particles, form)
        .bandwidth(bandwidth_rule(rule), bandwidths + problem * size);
  }
  return result;
}

Tensor svgd_update(Tensor particles, Tensor score, std::optional<Tensor> bandwidth, int64_t rule,
                   double bandwidth_number, int64_t kernel, double repulsion,
                   std::optional<double> step_size, int64_t precision, int64_t form,
                   int64_t first_row, std::optional<int64_t> rows) {
  SvgdArguments arguments(particles, score, bandwidth, bandwidth_number, kernel, repulsion,
                          step_size, precision, first_row, rows);
  std::optional<BandwidthRule> wanted;
  if (!bandwidth && rule >= 0) wanted = bandwidth_rule(rule);
  SvgdBatch batch(particles, arguments.problems, arguments.update);
  if (batch.takes(form)) {
    batch.launch(wanted, nullptr);
    return arguments.result;
  }
  for (int64_t problem = 0; problem < arguments.problems; ++problem) {
    const SvgdUpdate update = nth_problem(arguments.update, problem);
    SvgdLaunches(particles, update.particles, form).update(update, wanted);
  }
  return arguments.result;
}

Tensor svgd_distances(Tensor particles) {
  const CudaContext context(particles);
  const Rows rows = svgd_matrix(particles);
  SvgdParticles matrix = svgd_particles(rows);
  Tensor result =
      new_tensor(particles, {matrix.count, matrix.count}, accumulate_dtype(matrix.type));
  const WideMatrix wide(particles, matrix.type, matrix.data, matrix.count, matrix.dim,
                        matrix.stride, context.stream);
  matrix = {wide.type, matrix.count, matrix.dim, wide.data, wide.stride};
  check_cuda(launch_svgd_distances(matrix, result.mutable_data_ptr(), context.stream));
  return result;
}

}  // namespace
}  // namespace fused_ops

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, library) {
  library.impl("svgd_bandwidth", TORCH_BOX(&fused_ops::svgd_bandwidth));
  library.impl("svgd_update", TORCH_BOX(&fused_ops::svgd_update));
  library.impl("svgd_distances", TORCH_BOX(&fused_ops::svgd_distances));
}
