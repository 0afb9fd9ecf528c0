// SPDX-License-Identifier: BSD-3-Clause
// The ops behind svgd_phi, svgd_step and median_bandwidth. `svgd.h` says what each argument is.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, library) {
  library.def("svgd_bandwidth(Tensor particles, int rule, int form=-1) -> Tensor");
  // The bandwidth is `bandwidth` where given, else that of `rule`, or `bandwidth_number` where
  // rule is -1. `form` forces kernels on CUDA, for tests. The result is phi, or particles +
  // step_size * phi where step_size is given, of the `rows` particles from first_row on.
  library.def(
      "svgd_update(Tensor particles, Tensor score, Tensor? bandwidth, int rule, "
      "float bandwidth_number, int kernel, float repulsion, float? step_size, int precision=1, "
      "int form=-1, int first_row=0, int? rows=None) -> Tensor");
  // The squared distances that svgd_bandwidth selects from, (N, N); for tests.
  library.def("svgd_distances(Tensor particles) -> Tensor");
  // The median of pairs that several processes share (svgd_share.h): memory for it, with its first
  // and its last pass; a process's message of one pass, `received` being the sum of the last
  // messages; and the bandwidth from the sum of the last pass. All have the same particles.
  library.def("svgd_share_memory(Tensor particles, int shares, int form=-1) -> (Tensor, int, int)");
  library.def(
      "svgd_share_pass(Tensor particles, Tensor(a!) memory, Tensor? received, int rule, "
      "int share_pass, int share, int shares, int form=-1) -> Tensor");
  library.def(
      "svgd_share_bandwidth(Tensor particles, Tensor(a!) memory, Tensor received, int rule, "
      "int shares, int form=-1) -> Tensor");
}
