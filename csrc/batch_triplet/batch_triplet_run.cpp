// SPDX-License-Identifier: BSD-3-Clause
#include "batch_triplet/batch_triplet_run.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <vector>

#include "common/ceil_div.h"

namespace fused_ops {
namespace {

constexpr auto kByte = torch::headeronly::ScalarType::Byte;
constexpr auto kDouble = torch::headeronly::ScalarType::Double;
constexpr auto kLong = torch::headeronly::ScalarType::Long;

// out = a b, by torch's own product, whose settings it follows. The overload with an output is none
// that autocast narrows.
void multiply(const Tensor& a, const Tensor& b, const Tensor& out) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // takes over what is returned
}

// Rows with their labels, and memory for what is prepared of them.
class PreparedRows {
 public:
  PreparedRows(const Tensor& rows, const Tensor& labels, const char* name, ScalarType type)
      : rows_(checked(rows, labels, name)),
        labels_(torch::stable::contiguous(labels)),
        prepared_(
            new_tensor(rows, {rows_.count, prepared_width(rows_.dim)}, accumulate_dtype(type))),
        norms_(new_tensor(rows, {rows_.count}, accumulate_dtype(type))),
        pointers_{rows_.tensor.const_data_ptr(),
                  rows_.count,
                  rows_.stride,
                  static_cast<const int64_t*>(labels_.const_data_ptr()),
                  prepared_.mutable_data_ptr(),
                  norms_.mutable_data_ptr()} {}

  const BatchRows& pointers() const { return pointers_; }
  int64_t dim() const { return rows_.dim; }

 private:
  static const Tensor& checked(const Tensor& rows, const Tensor& labels, const char* name) {
    STD_TORCH_CHECK(rows.dim() == 2 && rows.numel() > 0, name,
                    ": expected a matrix with at least one element");
    STD_TORCH_CHECK(labels.scalar_type() == kLong && labels.dim() == 1 &&
                        labels.size(0) == rows.size(0) && labels.device() == rows.device(),
                    name, ": expected an int64 label for each row, on its device");
    return rows;
  }

  Rows rows_;
  Tensor labels_;
  Tensor prepared_;
  Tensor norms_;
  BatchRows pointers_;
};

// Views of memory as matrices in the accumulation type.
class Views {
 public:
  Views(const Tensor& like, ScalarType type)
      : device_(like.device()), dtype_(accumulate_dtype(type)), size_(accumulate_size(type)) {}

  // (rows, columns) of a matrix whose rows are `width` elements apart, from row `first` on.
  Tensor matrix(void* data, int64_t first, int64_t rows, int64_t columns, int64_t width) const {
    return view(data, first * width, {rows, columns}, {width, 1});
  }
  Tensor transposed(void* data, int64_t rows, int64_t columns, int64_t width) const {
    return view(data, 0, {columns, rows}, {1, width});
  }

 private:
  Tensor view(void* data, int64_t offset, std::array<int64_t, 2> sizes,
              std::array<int64_t, 2> strides) const {
    return torch::stable::from_blob(static_cast<char*>(data) + offset * size_, sizes, strides,
                                    device_, dtype_);
  }

  torch::stable::Device device_;
  torch::headeronly::ScalarType dtype_;
  int64_t size_;
};

Tensor empty_tensor(const Tensor& like) { return new_tensor(like, {0}, like.scalar_type()); }

void* data_or_null(const Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr();
}

template <typename Enum>
Enum checked_enum(int64_t value, Enum last, const char* name) {
  STD_TORCH_CHECK(value >= 0 && value <= static_cast<int64_t>(last), name, ": expected 0 to ",
                  static_cast<int64_t>(last), ", got ", value);
  return static_cast<Enum>(value);
}

}  // namespace

BatchTripletResults run_batch_triplet(BatchTripletKernels& kernels, const Tensor& embeddings,
                                      const Tensor& labels, const std::optional<Tensor>& references,
                                      const Tensor& reference_labels,
                                      const std::optional<Tensor>& weights,
                                      const BatchTripletSettings& settings) {
  const ScalarType type = kernel_scalar_type(embeddings, "embeddings");
  const torch::headeronly::ScalarType accumulate = accumulate_dtype(type);
  const PreparedRows anchors(embeddings, labels, "embeddings", type);
  std::optional<PreparedRows> others;
  if (references) {
    STD_TORCH_CHECK(references->scalar_type() == embeddings.scalar_type() &&
                        references->device() == embeddings.device(),
                    "references: expected the dtype and device of embeddings");
    others.emplace(*references, reference_labels, "references", type);
    STD_TORCH_CHECK(others->dim() == anchors.dim(), "references: expected the dim of embeddings");
  }
  const BatchRows& x = anchors.pointers();
  const BatchRows& y = others ? others->pointers() : x;
  Tensor weight;
  if (weights) {
    STD_TORCH_CHECK(weights->scalar_type() == accumulate && weights->dim() == 1 &&
                        weights->size(0) == x.count && weights->device() == embeddings.device(),
                    "weights: expected one for each anchor, in the accumulation type");
    weight = torch::stable::contiguous(*weights);
  }
  // Where the embeddings are their own references both parts belong to them.
  const bool anchors_grad = settings.embeddings_grad;
  const bool others_grad = others ? settings.references_grad : settings.embeddings_grad;
  const BatchTriplet call{type,
                          anchors.dim(),
                          x,
                          y,
                          settings.first_own,
                          settings.margin,
                          checked_enum(settings.mining, Mining::hard, "mining"),
                          checked_enum(settings.distance, BatchDistance::half_squared, "distance"),
                          settings.soft,
                          weights ? weight.const_data_ptr() : nullptr,
                          anchors_grad || others_grad};
  const BatchReduction reduction =
      checked_enum(settings.reduction, BatchReduction::sum, "reduction");
  STD_TORCH_CHECK(!call.soft || call.mining != Mining::all, "soft: expected another mining");

  const bool hard = call.mining == Mining::hard;
  const int64_t width = prepared_width(call.dim);
  const int64_t row_bytes = y.count * accumulate_size(type);
  const int64_t chunks = ceil_div(x.count, std::max<int64_t>(1, kernels.chunk_bytes() / row_bytes));
  const int64_t rows = ceil_div(x.count, chunks);
  // With all coefficients at once, rows that are anchors and references need one product.
  const bool symmetric = !others && chunks == 1;
  const bool sums_of_anchors = anchors_grad && !hard;
  const bool sums_of_others = others_grad && !hard && !symmetric;

  const Tensor anchor_totals =
      new_tensor(embeddings, {x.count * static_cast<int64_t>(sizeof(BatchTotals))}, kByte);
  auto* const totals_of = static_cast<BatchTotals*>(anchor_totals.mutable_data_ptr());
  Tensor picks = empty_tensor(embeddings), anchor_sums = picks, other_sums = picks;
  if (hard) {
    // A pick of double is no smaller than one of float.
    const int64_t bytes = x.count * static_cast<int64_t>(sizeof(HardPicks<double>));
    picks = new_tensor(embeddings, {bytes}, kByte);
  }
  if (sums_of_anchors) anchor_sums = new_tensor(embeddings, {x.count, width}, accumulate);
  if (sums_of_others) other_sums = new_tensor(embeddings, {y.count, width}, accumulate);
  const Views views(embeddings, type);

  kernels.prepare(call);
  {
    const Tensor products = new_tensor(embeddings, {rows, y.count}, accumulate);
    Tensor scratch = empty_tensor(embeddings), part = scratch;
    if (kernels.needs_scratch(call)) scratch = new_tensor(embeddings, {rows, y.count}, accumulate);
    if (sums_of_others && chunks > 1) part = new_tensor(embeddings, {y.count, width}, accumulate);
    void* const data = products.mutable_data_ptr();
    for (int64_t first = 0; first < x.count; first += rows) {
      const int64_t count = std::min(rows, x.count - first);
      const Tensor chunk = views.matrix(data, 0, count, y.count, y.count);
      multiply(views.matrix(x.prepared, first, count, call.dim, width),
               views.transposed(y.prepared, y.count, call.dim, width), chunk);
      kernels.mine(call,
                   {first, count, data, data_or_null(scratch), totals_of, data_or_null(picks)});
      if (sums_of_anchors) {
        if (symmetric) kernels.symmetrise(call, data);
        multiply(chunk, views.matrix(y.prepared, 0, y.count, width, width),
                 views.matrix(anchor_sums.mutable_data_ptr(), first, count, width, width));
      }
      if (sums_of_others) {
        const Tensor& to = first == 0 ? other_sums : part;
        multiply(views.transposed(data, count, y.count, y.count),
                 views.matrix(x.prepared, first, count, width, width), to);
        if (first > 0) {
          kernels.add(call, other_sums.mutable_data_ptr(), part.const_data_ptr(), y.count * width);
        }
      }
    }
  }

  std::vector<int64_t> sizes;
  if (reduction == BatchReduction::none) sizes.push_back(x.count);
  const Tensor loss = new_tensor(embeddings, sizes, accumulate);
  const Tensor totals = new_tensor(embeddings, {kBatchTotals}, kDouble);
  const Tensor scale = new_tensor(embeddings, {1}, kDouble);
  auto* const factor = static_cast<double*>(scale.mutable_data_ptr());
  kernels.reduce(call, totals_of, reduction, loss.mutable_data_ptr(),
                 static_cast<double*>(totals.mutable_data_ptr()), factor);

  const auto gradient_of = [&](const BatchRows& rows_of, bool as_anchors, bool as_others) {
    const Tensor gradient = new_tensor(embeddings, {rows_of.count, call.dim}, accumulate);
    void* const to = gradient.mutable_data_ptr();
    if (hard) {
      kernels.hard_gradient(call,
                            {&rows_of, as_anchors, as_others, picks.const_data_ptr(), factor, to});
    } else {
      const Tensor& sums = as_anchors ? anchor_sums : other_sums;
      const bool both = as_anchors && as_others && !symmetric;
      const void* more = both ? other_sums.const_data_ptr() : nullptr;
      kernels.gradient(call, {&rows_of, sums.const_data_ptr(), more, factor, to});
    }
    return gradient;
  };
  Tensor grad_embeddings = new_tensor(embeddings, {0}, accumulate);
  Tensor grad_references = grad_embeddings;
  if (anchors_grad) grad_embeddings = gradient_of(x, true, !others);
  grad_references =
      others && others_grad ? gradient_of(y, false, true) : new_tensor(embeddings, {0}, accumulate);
  return {loss, totals, grad_embeddings, grad_references};
}

}  // namespace fused_ops
