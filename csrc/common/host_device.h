// SPDX-License-Identifier: BSD-3-Clause
// Marks functions that CPU and CUDA code share.

#pragma once

#ifdef __CUDACC__
#define FUSED_OPS_HOST_DEVICE __host__ __device__
#else
#define FUSED_OPS_HOST_DEVICE
#endif
