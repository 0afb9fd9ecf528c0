// SPDX-License-Identifier: BSD-3-Clause
// Forms of a call that tests ask for.

#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdint>

#include "svgd/svgd_tuning.h"

namespace fused_ops {

inline SvgdForm svgd_form(int64_t form) {
  STD_TORCH_CHECK(form >= -1 && form < kSvgdFormCount, "form: expected -1 to ", kSvgdFormCount - 1,
                  ", got ", form);
  return static_cast<SvgdForm>(form);
}

// Makes the median's policy that of a form. `small` is whether the one launch takes the particles.
inline void force_form(SvgdPolicy& policy, SvgdForm form, bool small) {
  BracketPolicy& bracket = policy.bracket;
  const bool many = bracket.sample_size > 0;
  const bool possible = form == SvgdForm::automatic || form == SvgdForm::tiles ||
                        (form == SvgdForm::small      ? small
                         : form == SvgdForm::products ? many && bracket.tensor_cores
                                                      : many);
  STD_TORCH_CHECK(possible, "form: ", kSvgdForms[static_cast<int>(form)],
                  " does not take these particles on this device");
  if (form == SvgdForm::automatic) return;
  if (form == SvgdForm::tiles) bracket.sample_size = 0;
  bracket.tensor_cores &= form == SvgdForm::products;
  if (form == SvgdForm::missed) bracket.offset = 1;
}

}  // namespace fused_ops
