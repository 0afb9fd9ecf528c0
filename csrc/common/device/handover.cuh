// SPDX-License-Identifier: BSD-3-Clause
// How one block of a launch gathers what the others leave, without a second launch, atomics, or
// memory that must be cleared beforehand.
//
// A value counts as handed over once the numbers beside it are the launch's ticket, which no other
// launch has. Each 8 bytes of it travel with a ticket of their own in one access of 16 bytes, which
// is seen whole or not at all: so nobody waits for a fence on one side, nor reads twice on the
// other. The receiver wipes the tickets, since a CUDA graph repeats a launch ticket and all.
// Whoever waits must not be waited for itself; the last block of a grid is a safe choice, because
// the others have been started before it.

#pragma once

#include <cstdint>
#include <cstring>

namespace fused_ops {

struct alignas(16) HandoverWord {
  uint64_t part;
  uint64_t ticket;

  __device__ void leave(const HandoverWord& word) {
    asm volatile(
        "{ .reg .b128 word; mov.b128 word, {%1, %2}; st.relaxed.gpu.global.b128 [%0], word; }" ::
            "l"(this),
        "l"(word.part), "l"(word.ticket)
        : "memory");
  }
  __device__ HandoverWord look() const {
    HandoverWord word;
    asm volatile(
        "{ .reg .b128 word; ld.relaxed.gpu.global.b128 word, [%2]; mov.b128 {%0, %1}, word; }"
        : "=l"(word.part), "=l"(word.ticket)
        : "l"(this)
        : "memory");
    return word;
  }
};

template <typename Value>
struct Handover {
  static constexpr int kWords = (sizeof(Value) + 7) / 8;
  HandoverWord words[kWords];
};

template <typename Value>
__device__ inline void hand_over(Handover<Value>* to, const Value& value, uint64_t ticket) {
  uint64_t parts[Handover<Value>::kWords] = {};
  memcpy(parts, &value, sizeof(value));
#pragma unroll
  for (int i = 0; i < Handover<Value>::kWords; ++i) to->words[i].leave({parts[i], ticket});
}

// Calls `take` with each of `count` values: this thread's are those at its own index in the block
// and every blockDim.x-th from there on, in this order.
template <typename Value, typename Take>
__device__ inline void receive_all(Handover<Value>* from, int count, uint64_t ticket, Take take) {
  constexpr int kWords = Handover<Value>::kWords;
  constexpr int kBatch = 4 / kWords > 0 ? 4 / kWords : 1;
  for (int first = threadIdx.x; first < count; first += kBatch * blockDim.x) {
    HandoverWord words[kBatch][kWords] = {};
    // All are looked at before the first is waited for, since an answer takes long.
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * static_cast<int>(blockDim.x);
      if (index >= count) continue;
#pragma unroll
      for (int k = 0; k < kWords; ++k) words[i][k] = from[index].words[k].look();
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * static_cast<int>(blockDim.x);
      if (index >= count) break;
      uint64_t parts[kWords];
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        HandoverWord& place = from[index].words[k];
        while (words[i][k].ticket != ticket) words[i][k] = place.look();
        parts[k] = words[i][k].part;
        place.ticket = 0;
      }
      Value value;
      memcpy(&value, parts, sizeof(value));
      take(value);
    }
  }
}

}  // namespace fused_ops
