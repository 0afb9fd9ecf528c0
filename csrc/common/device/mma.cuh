// SPDX-License-Identifier: BSD-3-Clause
// One warp's products of half-precision matrices, sm_75 and above.
//
// A warp multiplies a 16 x 16 operand A by a 16 x 8 operand B. Lane l holds, two neighbours of the
// depth packed in a word, the lower one first,
//   of A, word w:  row l / 4 + 8 (w % 2), depths 2 (l % 4) + 8 (w / 2) and one more
//   of B, word w:  column l / 4, depths 2 (l % 4) + 8 w and one more
//   of the sum, value e:  row l / 4 + 8 (e / 2), column 2 (l % 4) + e % 2.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace fused_ops {

// Loads four 8 x 8 matrices of halves from shared memory, one to a word; lane l gives the address
// of row l % 8 of matrix l / 8, 16-byte aligned. Transposed if asked for.
template <bool transposed>
__device__ inline void load_matrices(uint32_t (&words)[4], const __half* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  }
}

// The same with the choice made at run time, for all lanes alike.
__device__ inline void load_matrices_either(uint32_t (&words)[4], const __half* row,
                                            bool transposed) {
  asm volatile(
      "{\n.reg .pred transposed;\nsetp.ne.b32 transposed, %5, 0;\n"
      "@transposed ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
      "@!transposed ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n}\n"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))), "r"(static_cast<int>(transposed))
      : "memory");
}

// sum += A B.
__device__ inline void add_product(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                   uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const uint32_t b[2] = {b0, b1};
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[2 * part]), "r"(a[2 * part + 1]), "r"(b[part]));
  }
#endif
}

// Two floats as two halves each, to about 2^-22 of them where the lower halves are normal numbers.
struct HalfPair {
  uint32_t high;
  uint32_t low;
};

__device__ inline HalfPair split_pair(float first, float second) {
  const __half2 high = __floats2half2_rn(first, second);
  const __half2 low = __floats2half2_rn(first - __low2float(high), second - __high2float(high));
  return {*reinterpret_cast<const uint32_t*>(&high), *reinterpret_cast<const uint32_t*>(&low)};
}

__device__ inline float2 join_pair(const HalfPair& pair) {
  const auto high = *reinterpret_cast<const __half2*>(&pair.high);
  const auto low = *reinterpret_cast<const __half2*>(&pair.low);
  return {__low2float(high) + __low2float(low), __high2float(high) + __high2float(low)};
}

}  // namespace fused_ops
