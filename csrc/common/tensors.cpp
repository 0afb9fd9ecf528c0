// SPDX-License-Identifier: BSD-3-Clause
#include "common/tensors.h"

#include <torch/headeronly/util/Exception.h>

#include <optional>

namespace fused_ops {
namespace {

// The stride of the rows of `tensor`, or nothing where one stride does not reach them all.
std::optional<int64_t> row_stride(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) return std::nullopt;
  int64_t stride = 0;   // of the innermost leading dimension seen so far
  int64_t covered = 1;  // rows reached by the dimensions seen so far
  for (int64_t d = last - 1; d >= 0; --d) {
    if (tensor.size(d) == 1) continue;
    if (covered == 1) {
      stride = tensor.stride(d);
    } else if (tensor.stride(d) != stride * covered) {
      return std::nullopt;
    }
    covered *= tensor.size(d);
  }
  return stride;
}

}  // namespace

ScalarType kernel_scalar_type(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case torch::headeronly::ScalarType::Half:
      return ScalarType::float16;
    case torch::headeronly::ScalarType::BFloat16:
      return ScalarType::bfloat16;
    case torch::headeronly::ScalarType::Float:
      return ScalarType::float32;
    case torch::headeronly::ScalarType::Double:
      return ScalarType::float64;
    default:
      STD_TORCH_CHECK(false, name, ": expected float16, bfloat16, float32 or float64");
  }
}

torch::headeronly::ScalarType accumulate_dtype(ScalarType type) {
  return type == ScalarType::float64 ? torch::headeronly::ScalarType::Double
                                     : torch::headeronly::ScalarType::Float;
}

Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& sizes,
                  torch::headeronly::ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device_type,
      like.get_device_index(), &handle);
  // That is all that can go wrong here, and the error code does not say it.
  STD_TORCH_CHECK(error == AOTI_TORCH_SUCCESS,
                  like.is_cuda() ? "CUDA out of memory" : "out of memory", ". Tried to allocate ",
                  stride, " elements of ", toString(dtype));
  return Tensor(handle);
}

Rows::Rows(const Tensor& source) : tensor(source) {
  std::optional<int64_t> evenly = row_stride(source);
  if (!evenly) {
    tensor = torch::stable::contiguous(source);
    evenly = source.size(source.dim() - 1);
  }
  dim = source.size(source.dim() - 1);
  count = source.numel() / dim;
  stride = *evenly;
}

}  // namespace fused_ops
