// SPDX-License-Identifier: BSD-3-Clause
// The pybind11 side of fused_ops._C: questions about the build and the kernels that need no tensor.
// Tensors go through the torch ops, which this module brings along when it is imported.

#include <pybind11/pybind11.h>

#include "svgd/svgd.h"
#include "svgd/svgd_share.h"
#include "triplet/triplet_indexed_tuning.h"
#include "triplet/triplet_limits.h"
#include "triplet/triplet_tuning.h"

#ifdef FUSED_OPS_CUDA_VERSION
#include <cuda_runtime_api.h>

#include "svgd/svgd_batch_launch.h"
#include "svgd/svgd_launch.h"
#include "svgd/svgd_small_launch.h"
#else
#define FUSED_OPS_CUDA_VERSION ""
#define FUSED_OPS_ARCHITECTURES ""
#define FUSED_OPS_WITHOUT_CUDA
#endif

namespace py = pybind11;

namespace {

template <typename T, size_t size>
py::tuple as_tuple(const T (&values)[size]) {
  py::tuple result(size);
  for (size_t i = 0; i < size; ++i) result[i] = values[i];
  return result;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.def(
      "build_info",
      [] {
        py::dict info;
        info["cuda"] = FUSED_OPS_CUDA_VERSION;
        info["architectures"] = FUSED_OPS_ARCHITECTURES;
        info["compiler"] = __VERSION__;
        info["torch_target"] = "2.10";
        return info;
      },
      "What the module was built with. `cuda` is empty where the CUDA kernels were left out.");

  module.attr("DTYPES") = as_tuple(fused_ops::kScalarTypeNames);
  module.attr("STEIN_KERNELS") = as_tuple(fused_ops::kSteinKernels);
  module.attr("PRECISIONS") = as_tuple(fused_ops::kPrecisions);
  module.attr("BANDWIDTH_RULES") = as_tuple(fused_ops::kBandwidthRules);

#ifndef FUSED_OPS_WITHOUT_CUDA
  module.def(
      "driver_cuda_version",
      [] {
        int version = 0;
        cudaDriverGetVersion(&version);
        return py::make_tuple(version / 1000, version % 1000 / 10);
      },
      "The newest CUDA that the installed driver runs, (0, 0) without one. Creates no context.");
  module.attr("SVGD_FORMS") = as_tuple(fused_ops::kSvgdForms);
  module.def(
      "svgd_forms",
      [](int64_t problems, int64_t count, int64_t dim, int dtype, int kernel, int precision,
         int multiprocessors, int shared_memory, int capability) {
        using namespace fused_ops;
        const DeviceLimits limits{multiprocessors, shared_memory, capability};
        // 16-bit particles are cast to float32.
        const bool single = static_cast<ScalarType>(dtype) != ScalarType::float64;
        const ScalarType type = single ? ScalarType::float32 : ScalarType::float64;
        const SvgdParticles particles{type, count, dim, nullptr, dim};
        py::dict result;
        if (problems > 1 && svgd_batch_takes(particles, shared_memory)) {
          result["median"] = "batch";
          result["update"] = "batch";
          return result;
        }
        const bool small = svgd_small_policy(particles, multiprocessors, shared_memory).bands > 0;
        const StreamPolicy stream =
            choose_stream_policy(count, count, dim, static_cast<SteinKernel>(kernel),
                                 static_cast<Precision>(precision), limits);
        const SvgdForm median = choose_median_form(svgd_policy(particles, count, 1, limits), small);
        const SvgdForm update = choose_update_form(count, single, stream, small);
        result["median"] = kSvgdForms[static_cast<int>(median)];
        result["update"] = kSvgdForms[static_cast<int>(update)];
        return result;
      },
      py::arg("problems"), py::arg("count"), py::arg("dim"), py::arg("dtype"), py::arg("kernel"),
      py::arg("precision"), py::arg("multiprocessors"), py::arg("shared_memory"),
      py::arg("capability"),
      "Which CUDA kernels form a call on (problems, count, dim) particles; names by their index.");
#endif

  module.attr("SVGD_SHARE_SLOTS") = static_cast<int>(fused_ops::kShareSlots);
  module.attr("TRIPLET_NORMS") = as_tuple(fused_ops::kTripletNorms);
  module.attr("TRIPLET_FORMS") = as_tuple(fused_ops::kTripletForms);
  module.attr("TRIPLET_LONGEST_HELD_ROW") = fused_ops::kTripletLongestHeldRow;
  module.def(
      "triplet_state_layout",
      [](double p, bool swap, int accumulate_size) {
        return py::make_tuple(sizeof(fused_ops::TripletStateHeader) / accumulate_size,
                              fused_ops::state_columns(fused_ops::triplet_norm(p).value(), swap));
      },
      py::arg("p"), py::arg("swap"), py::arg("accumulate_size"),
      "Elements of triplet_forward's state: its header, and each row.");
  module.def(
      "triplet_policy",
      [](int64_t rows, int64_t dim, int element_size, bool whole, bool packed, int multiprocessors,
         int shared_memory, int form) {
        const auto policy = fused_ops::choose_triplet_policy(
            rows, dim, fused_ops::kTripletAccessBytes / element_size, whole, packed,
            multiprocessors, shared_memory, static_cast<fused_ops::TripletForm>(form));
        py::dict result;
        result["form"] = fused_ops::kTripletForms[static_cast<int>(policy.form)];
        result["threads_per_block"] = policy.threads_per_block;
        result["threads_per_row"] = policy.threads_per_row;
        result["accesses"] = policy.accesses;
        result["stages"] = policy.stages;
        result["segments"] = policy.segments;
        result["segment_size"] = policy.segment_size;
        result["row_blocks"] = policy.row_blocks;
        result["holds_rows"] = policy.holds_rows;
        result["tile_rows"] = policy.tile_rows;
        result["shared_bytes"] = policy.shared_bytes;
        return result;
      },
      py::arg("rows"), py::arg("dim"), py::arg("element_size"), py::arg("whole"), py::arg("packed"),
      py::arg("multiprocessors"), py::arg("shared_memory"), py::arg("form") = -1,
      "The launch policy of the CUDA kernels for (rows, dim) inputs, whose rows start and end on "
      "16-byte boundaries (`whole`) and lie one behind another from such a boundary on "
      "(`packed`).");
  module.def(
      "triplet_indexed_policy",
      [](int64_t triplets, int64_t dim, int element_size, bool whole, int multiprocessors) {
        const auto policy = fused_ops::choose_triplet_indexed_policy(
            triplets, dim, whole ? fused_ops::kTripletAccessBytes / element_size : 1,
            multiprocessors, 0);
        py::dict result;
        result["forward_threads_per_row"] = policy.forward_threads_per_row;
        result["row_blocks"] = policy.row_blocks;
        result["backward_threads_per_row"] = policy.backward_threads_per_row;
        result["column_tiles"] = policy.column_tiles;
        result["share"] = policy.share;
        result["shares"] = policy.shares;
        return result;
      },
      py::arg("triplets"), py::arg("dim"), py::arg("element_size"), py::arg("whole"),
      py::arg("multiprocessors"),
      "The launch policy of the CUDA kernels for triplets of rows of `dim` elements that start and "
      "end on 16-byte boundaries (`whole`).");
}
