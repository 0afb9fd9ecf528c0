// SPDX-License-Identifier: BSD-3-Clause
// Fresh memory in large pages.

#pragma once

#include <sys/mman.h>

#include <cstdint>

namespace fused_ops {

// Asks the kernel to back new memory with 2 MB pages where the system leaves that to programs.
// Writing a fresh gradient is otherwise dominated by the faults of its 4 kB pages.
inline void advise_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
  // A refusal leaves the memory as it was, so there is nothing to handle.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace fused_ops
