// SPDX-License-Identifier: BSD-3-Clause
// What launch policies ask of a CUDA device.

#pragma once

namespace fused_ops {

struct DeviceLimits {
  int multiprocessors;
  int shared_memory;  // that a block may have, in bytes; nearly all of a multiprocessor's
  int capability;     // 10 * major + minor
};

}  // namespace fused_ops
