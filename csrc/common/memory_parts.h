// SPDX-License-Identifier: BSD-3-Clause
// Cuts one block of memory into the parts that a call needs.

#pragma once

#include <cstdint>

namespace fused_ops {

// Gives out parts one after another, each 256-byte aligned as the memory must be. Without memory
// `bytes` tells how much they need together.
class MemoryParts {
 public:
  explicit MemoryParts(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    char* part = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return reinterpret_cast<T*>(part);
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace fused_ops
