// SPDX-License-Identifier: BSD-3-Clause
#include "common/cuda_stream.h"

#include <torch/headeronly/util/Exception.h>

// It lives in libtorch_cuda, which a CPU build of torch lacks: hence weak, and null there.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device,
                                                                            void** stream);

namespace fused_ops {

void* current_cuda_stream(int32_t device) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "a CUDA tensor was given, but this torch build has no CUDA");
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
                  "torch could not tell the current stream of CUDA device ", device);
  return stream;
}

}  // namespace fused_ops
