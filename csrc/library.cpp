// SPDX-License-Identifier: BSD-3-Clause
// Claims the namespace `fused_ops`: a second library that defines it fails when it is loaded. Each
// op adds its schema and kernels in files of its own.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(fused_ops, library) {}
