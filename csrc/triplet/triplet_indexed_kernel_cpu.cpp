// SPDX-License-Identifier: BSD-3-Clause
#include "triplet/triplet_indexed_kernel_cpu.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "common/clones.h"
#include "triplet/triplet_types_cpu.h"

namespace fused_ops {
namespace {

template <typename scalar, Norm norm, typename T>
FUSED_OPS_CLONES void add_term(const scalar* row, const scalar* other, int64_t dim, T eps,
                               const TripletTerm<T>& term, T* sums) {
  const T sign = term.sign, distance = term.distance, coefficient = term.coefficient;
#pragma GCC ivdep
  for (int64_t i = 0; i < dim; ++i) {
    const T x = sign * (static_cast<T>(row[i]) - static_cast<T>(other[i])) + eps;
    sums[i] += scaled_phi<norm>(x, distance, coefficient);
  }
}

template <typename scalar, Norm norm>
void backward_entries(const TripletIndexedBackward& params, int64_t begin, int64_t end) {
  using T = CpuAccumulate<scalar>;
  const TripletInputs& in = params.backward.inputs;
  const auto* embeddings = static_cast<const scalar*>(in.anchor);
  const auto upstream = [&](int64_t triplet) {
    return upstream_gradient<scalar, T>(params.backward, triplet);
  };
  const auto row_of = [&](int64_t place) { return params.bits.row_of(params.order[place]); };
  std::vector<T> sums(in.dim);
  int64_t place = begin;
  // The run that `begin` is within belongs to whoever has its beginning.
  while (place > 0 && place < end && row_of(place) == row_of(place - 1)) ++place;
  while (place < end) {
    const int64_t row = row_of(place);
    std::fill(sums.begin(), sums.end(), T(0));
    for (; place < 3 * in.rows && row_of(place) == row; ++place) {
      const auto entry =
          load_entry<norm, T>(params.backward, params.bits.entry_of(params.order[place]), upstream);
      for (int i = 0; i < entry.terms; ++i) {
        add_term<scalar, norm>(embeddings + row * in.anchor_stride,
                               embeddings + entry.term[i].other * in.anchor_stride, in.dim,
                               static_cast<T>(in.eps), entry.term[i], sums.data());
      }
    }
    scalar* gradient = static_cast<scalar*>(params.gradient) + row * in.dim;
    for (int64_t i = 0; i < in.dim; ++i) gradient[i] = static_cast<scalar>(sums[i]);
  }
}

}  // namespace

void triplet_indexed_backward_entries(const TripletIndexedBackward& params, int64_t begin,
                                      int64_t end) {
  dispatch_on_cpu(params.backward.inputs, [&](auto* pointer, auto norm) {
    backward_entries<std::remove_pointer_t<decltype(pointer)>, norm.value>(params, begin, end);
  });
}

}  // namespace fused_ops
