// SPDX-License-Identifier: BSD-3-Clause
// CPU functions compiled once per instruction set, the best chosen when the library is loaded.
//
// FUSED_OPS_CLONES goes on the function, FUSED_OPS_INLINE on every helper that must be compiled
// into each clone. Elsewhere than on GCC for x86-64 there is one version, for the baseline.

#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FUSED_OPS_CLONES \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FUSED_OPS_CLONES
#endif

#define FUSED_OPS_INLINE inline __attribute__((always_inline))
#define FUSED_OPS_INLINE_LAMBDA __attribute__((always_inline))
