// SPDX-License-Identifier: BSD-3-Clause
// The CPU kernel of triplet_margin_loss_indexed on raw pointers. Its forward is that of
// triplet_kernel_cpu.h.

#pragma once

#include <cstdint>

#include "triplet/triplet_indexed.h"

namespace fused_ops {

// The gradients of the rows whose runs begin in [begin, end) of the sorted entries, each by one
// thread: how entries are shared out does not change a bit.
void triplet_indexed_backward_entries(const TripletIndexedBackward& params, int64_t begin,
                                      int64_t end);

}  // namespace fused_ops
