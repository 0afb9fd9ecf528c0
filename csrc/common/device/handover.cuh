// SPDX-License-Identifier: BSD-3-Clause
// How one block of a launch gathers what the others leave, without a second launch, atomics, or
// memory that must be cleared beforehand.
//
// A value counts as handed over once the number beside it is the launch's ticket, which no other
// launch has. The receiver wipes the number, since a CUDA graph repeats a launch ticket and all.
// Whoever waits must not be waited for itself; the last block of a grid is a safe choice, because
// the others have been started before it.

#pragma once

#include <cstdint>

namespace fused_ops {

template <typename Value>
struct alignas(16) Handover {
  Value value;
  uint64_t ticket;
};

template <typename Value>
__device__ inline void hand_over(Handover<Value>* to, const Value& value, uint64_t ticket) {
  to->value = value;
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&to->ticket), "l"(ticket) : "memory");
}

template <typename Value>
__device__ inline Value receive(Handover<Value>* from, uint64_t ticket) {
  uint64_t seen;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                 : "=l"(seen)
                 : "l"(&from->ticket)
                 : "memory");
  } while (seen != ticket);
  const Value value = from->value;
  from->ticket = 0;
  return value;
}

}  // namespace fused_ops
