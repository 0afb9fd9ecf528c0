// SPDX-License-Identifier: BSD-3-Clause
// CPU functions compiled once per instruction set, the best chosen when the library is loaded.
//
// FUSED_OPS_CLONES goes on the function, FUSED_OPS_INLINE on every helper that must be compiled
// into each clone. Elsewhere than on GCC for x86-64 there is one version, for the baseline.

#pragma once

#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FUSED_OPS_CLONES \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FUSED_OPS_CLONES
#endif

#define FUSED_OPS_INLINE inline __attribute__((always_inline))
#define FUSED_OPS_INLINE_LAMBDA __attribute__((always_inline))

namespace fused_ops {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// One function for each instruction set, since clones of one would all have the same vectors: too
// long ones are kept in memory. All but the last have a fused multiply-add.
#define FUSED_OPS_TARGET(name) __attribute__((target(name), optimize("fp-contract=fast")))
template <typename Body>
FUSED_OPS_TARGET("arch=x86-64-v4")
void with_512_bits(const Body& body) {
  body(std::integral_constant<int, 64>{});
}
template <typename Body>
FUSED_OPS_TARGET("arch=x86-64-v3")
void with_256_bits(const Body& body) {
  body(std::integral_constant<int, 32>{});
}
#undef FUSED_OPS_TARGET
#endif

// Calls `body` with the bytes of this machine's vectors, compiled for them. `body` is a
// FUSED_OPS_INLINE_LAMBDA, and what it calls is FUSED_OPS_INLINE. Bits of results may differ
// between instruction sets.
template <typename Body>
void with_vectors(const Body& body) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  if (__builtin_cpu_supports("x86-64-v4")) return with_512_bits(body);
  if (__builtin_cpu_supports("x86-64-v3")) return with_256_bits(body);
#endif
  body(std::integral_constant<int, 16>{});
}

}  // namespace fused_ops
