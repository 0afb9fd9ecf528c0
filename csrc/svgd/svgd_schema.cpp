// SPDX-License-Identifier: BSD-3-Clause
// The ops behind svgd_phi, svgd_step and median_bandwidth. `svgd.h` says what each argument is.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, library) {
  library.def("svgd_bandwidth(Tensor particles, int rule, int form=-1) -> Tensor");
  // The bandwidth is `bandwidth` where given, else that of `rule`, or `bandwidth_number` where
  // rule is -1. `form` forces kernels on CUDA, for tests. The result is phi, or particles +
  // step_size * phi where step_size is given.
  library.def(
      "svgd_update(Tensor particles, Tensor score, Tensor? bandwidth, int rule, "
      "float bandwidth_number, int kernel, float repulsion, float? step_size, int precision=1, "
      "int form=-1) -> Tensor");
  // The squared distances that svgd_bandwidth selects from, (N, N); for tests.
  library.def("svgd_distances(Tensor particles) -> Tensor");
}
