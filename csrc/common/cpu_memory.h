// SPDX-License-Identifier: BSD-3-Clause
// Scratch memory of the CPU ops.

#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <memory>
#include <new>

namespace fused_ops {

// Uninitialised. Where there is not enough the error says so, which std::bad_alloc would not.
template <typename T>
std::unique_ptr<T[]> cpu_memory(int64_t count) {
  std::unique_ptr<T[]> memory(new (std::nothrow) T[count]);
  STD_TORCH_CHECK(memory != nullptr, "out of memory. Tried to allocate ",
                  count * static_cast<int64_t>(sizeof(T)), " bytes");
  return memory;
}

}  // namespace fused_ops
