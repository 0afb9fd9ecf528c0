// SPDX-License-Identifier: BSD-3-Clause
// Work of the CPU ops shared out among torch's threads.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace fused_ops {

// Calls `function(begin, end)` with parts of [0, items). A thread is woken for `work_per_thread` or
// more only: less would cost more than it saves.
template <typename Function>
void parallel_for_items(int64_t items, int64_t work_per_item, int64_t work_per_thread,
                        const Function& function) {
  const int64_t grain = std::max<int64_t>(1, work_per_thread / std::max<int64_t>(1, work_per_item));
  if (items <= grain) {
    function(0, items);
  } else {
    torch::stable::parallel_for(0, items, grain, function);
  }
}

}  // namespace fused_ops
