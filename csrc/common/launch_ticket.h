// SPDX-License-Identifier: BSD-3-Clause
// Tickets for device/handover.cuh.

#pragma once

#include <atomic>
#include <cstdint>
#include <random>

namespace fused_ops {

// A ticket no other launch has had, and chance alone makes memory hold.
inline uint64_t next_launch_ticket() {
  static std::atomic<uint64_t> ticket{(uint64_t{std::random_device()()} << 32) + 1};
  return ticket++;
}

}  // namespace fused_ops
