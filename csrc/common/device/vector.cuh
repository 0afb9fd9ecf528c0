// SPDX-License-Identifier: BSD-3-Clause
// Conversions between element and accumulation types, and loads and stores of several elements.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/scalar_type.h"

namespace fused_ops {

template <typename scalar>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};

// torch compiles with __CUDA_NO_HALF_CONVERSIONS__, hence the named conversions.
__device__ inline float to_accumulate(__half value) { return __half2float(value); }
__device__ inline float to_accumulate(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_accumulate(float value) { return value; }
__device__ inline double to_accumulate(double value) { return value; }

template <typename scalar>
__device__ inline scalar from_accumulate(typename AccumulateType<scalar>::type value) {
  return value;
}
template <>
__device__ inline __half from_accumulate<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_accumulate<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <typename scalar, int width>
struct alignas(sizeof(scalar) * width) Vector {
  scalar value[width];
};

template <int width, typename scalar>
__device__ inline Vector<scalar, width> load(const scalar* address) {
  return *reinterpret_cast<const Vector<scalar, width>*>(address);
}

template <int width, typename scalar>
__device__ inline void store(scalar* address, const Vector<scalar, width>& vector) {
  *reinterpret_cast<Vector<scalar, width>*>(address) = vector;
}

// 16 bytes of elements in four registers. As an array, 16-bit elements would take one each.
template <typename scalar>
struct alignas(16) Packed {
  unsigned word[4] = {};

  static __device__ Packed load(const scalar* address) {
    return *reinterpret_cast<const Packed*>(address);
  }
  __device__ void store(scalar* address) const { *reinterpret_cast<Packed*>(address) = *this; }

  __device__ scalar get(int i) const {
    if constexpr (sizeof(scalar) == 8) {
      return __hiloint2double(word[2 * i + 1], word[2 * i]);
    } else if constexpr (sizeof(scalar) == 4) {
      return __uint_as_float(word[i]);
    } else {
      const auto bits = static_cast<unsigned short>(word[i / 2] >> (i % 2 * 16));
      return *reinterpret_cast<const scalar*>(&bits);
    }
  }
  // Of an element that is zero still.
  __device__ void set(int i, scalar value) {
    if constexpr (sizeof(scalar) == 8) {
      word[2 * i] = __double2loint(value);
      word[2 * i + 1] = __double2hiint(value);
    } else if constexpr (sizeof(scalar) == 4) {
      word[i] = __float_as_uint(value);
    } else {
      word[i / 2] |= unsigned{*reinterpret_cast<const unsigned short*>(&value)} << (i % 2 * 16);
    }
  }
};

// Calls `function` with a null pointer of the CUDA type that `type` stands for.
template <typename Function>
auto dispatch_scalar(ScalarType type, Function&& function) {
  switch (type) {
    case ScalarType::float16:
      return function(static_cast<__half*>(nullptr));
    case ScalarType::bfloat16:
      return function(static_cast<__nv_bfloat16*>(nullptr));
    case ScalarType::float32:
      return function(static_cast<float*>(nullptr));
    default:
      return function(static_cast<double*>(nullptr));
  }
}

}  // namespace fused_ops
