// SPDX-License-Identifier: BSD-3-Clause
#include "batch_triplet/batch_triplet_run.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <vector>

#include "common/ceil_div.h"
#include "common/memory_parts.h"

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
        memory_(new_tensor(rows, {rows_.count * (prepared_width(rows_.dim) + 1)},
                           accumulate_dtype(type))),
        pointers_{rows_.tensor.const_data_ptr(),
                  rows_.count,
                  rows_.stride,
                  static_cast<const int64_t*>(labels_.const_data_ptr()),
                  memory_.mutable_data_ptr(),
                  static_cast<char*>(memory_.mutable_data_ptr()) +
                      rows_.count * prepared_width(rows_.dim) * accumulate_size(type)} {}

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
  Tensor memory_;  // of the prepared rows, and behind them the norms
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

template <typename Enum>
Enum checked_enum(int64_t value, Enum last, const char* name) {
  STD_TORCH_CHECK(value >= 0 && value <= static_cast<int64_t>(last), name, ": expected 0 to ",
                  static_cast<int64_t>(last), ", got ", value);
  return static_cast<Enum>(value);
}

// One call: what is computed, in which memory, and in which order.
class Course {
 public:
  Course(BatchTripletKernels& kernels, const Tensor& like, const BatchTriplet& call,
         bool anchors_grad, bool references_grad)
      : kernels_(kernels),
        like_(like),
        call_(call),
        views_(like, call.type),
        hard_(call.mining == Mining::hard),
        element_(accumulate_size(call.type)),
        width_(prepared_width(call.dim)),
        chunks_(ceil_div(
            call.anchors.count,
            std::max<int64_t>(1, kernels.chunk_bytes() / (call.references.count * element_)))),
        chunk_rows_(ceil_div(call.anchors.count, chunks_)),
        symmetric_(call.shares_rows() && chunks_ == 1),
        sums_anchors_(anchors_grad && !hard_),
        sums_references_(references_grad && !hard_ && !symmetric_) {
    MemoryParts sizes(nullptr);
    take(sizes);
    memory_ = new_tensor(like, {sizes.bytes()}, kByte);
    MemoryParts parts(memory_.mutable_data_ptr());
    take(parts);
  }

  void mine() {
    const BatchRows &x = call_.anchors, &y = call_.references;
    kernels_.prepare(call_);
    const int64_t products = chunk_rows_ * y.count * element_;
    const int64_t scratch = kernels_.needs_scratch(call_) ? products : 0;
    const int64_t part = sums_references_ && chunks_ > 1 ? y.count * width_ * element_ : 0;
    const auto take_parts = [&](MemoryParts& parts) {
      return std::array<char*, 3>{parts.take<char>(products), parts.take<char>(scratch),
                                  parts.take<char>(part)};
    };
    MemoryParts sizes(nullptr);
    take_parts(sizes);
    const Tensor memory = new_tensor(like_, {sizes.bytes()}, kByte);
    MemoryParts parts(memory.mutable_data_ptr());
    const auto [data, added_up, of_chunk] = take_parts(parts);
    for (int64_t first = 0; first < x.count; first += chunk_rows_) {
      const int64_t count = std::min(chunk_rows_, x.count - first);
      const Tensor chunk = views_.matrix(data, 0, count, y.count, y.count);
      multiply(views_.matrix(x.prepared, first, count, call_.dim, width_),
               views_.transposed(y.prepared, y.count, call_.dim, width_), chunk);
      kernels_.mine(call_, {first, count, data, scratch > 0 ? added_up : nullptr, totals_, picks_});
      if (sums_anchors_) {
        if (symmetric_) kernels_.symmetrise(call_, data);
        multiply(chunk, rows_of(y.prepared, 0, y.count), rows_of(anchor_sums_, first, count));
      }
      if (sums_references_) {
        char* const to = first == 0 ? reference_sums_ : of_chunk;
        multiply(views_.transposed(data, count, y.count, y.count),
                 rows_of(x.prepared, first, count), rows_of(to, 0, y.count));
        if (first > 0) kernels_.add(call_, reference_sums_, of_chunk, y.count * width_);
      }
    }
  }

  void reduce(BatchReduction reduction, const Tensor& loss, const Tensor& totals) {
    kernels_.reduce(call_, totals_, reduction, loss.mutable_data_ptr(),
                    static_cast<double*>(totals.mutable_data_ptr()), scale_);
  }

  // Of rows as anchors, as references, or as both.
  void gradient(const BatchRows& rows, bool as_anchors, bool as_references, const Tensor& to) {
    void* const data = to.mutable_data_ptr();
    if (hard_) {
      kernels_.hard_gradient(call_, {&rows, as_anchors, as_references, picks_, scale_, data});
    } else {
      const bool both = as_anchors && as_references && !symmetric_;
      kernels_.gradient(call_, {&rows, as_anchors ? anchor_sums_ : reference_sums_,
                                both ? reference_sums_ : nullptr, scale_, data});
    }
  }

 private:
  void take(MemoryParts& parts) {
    const int64_t anchors = call_.anchors.count, references = call_.references.count;
    scale_ = parts.take<double>(1);
    totals_ = parts.take<BatchTotals>(anchors);
    // A pick of double is no smaller than one of float.
    picks_ = parts.take<HardPicks<double>>(hard_ ? anchors : 0);
    anchor_sums_ = parts.take<char>(sums_anchors_ ? anchors * width_ * element_ : 0);
    reference_sums_ = parts.take<char>(sums_references_ ? references * width_ * element_ : 0);
  }
  // Whole prepared rows, or sums of such.
  Tensor rows_of(void* data, int64_t first, int64_t count) const {
    return views_.matrix(data, first, count, width_, width_);
  }

  BatchTripletKernels& kernels_;
  const Tensor& like_;
  const BatchTriplet& call_;
  Views views_;
  bool hard_;
  int64_t element_;  // bytes
  int64_t width_;
  int64_t chunks_;
  int64_t chunk_rows_;
  bool symmetric_;  // all coefficients at once, of rows that are both sides: one product will do
  bool sums_anchors_;
  bool sums_references_;
  Tensor memory_;
  double* scale_;
  BatchTotals* totals_;
  void* picks_;
  char* anchor_sums_;
  char* reference_sums_;
};

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
  std::optional<Tensor> weight;
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
                          weight ? weight->const_data_ptr() : nullptr,
                          anchors_grad || others_grad};
  const BatchReduction reduction =
      checked_enum(settings.reduction, BatchReduction::sum, "reduction");
  STD_TORCH_CHECK(!call.soft || call.mining != Mining::all, "soft: expected another mining");

  std::vector<int64_t> sizes;
  if (reduction == BatchReduction::none) sizes.push_back(x.count);
  const Tensor loss = new_tensor(embeddings, sizes, accumulate);
  const Tensor totals = new_tensor(embeddings, {kBatchTotals}, kDouble);
  const auto gradient_for = [&](int64_t count, bool wanted) {
    return wanted ? new_tensor(embeddings, {count, call.dim}, accumulate)
                  : new_tensor(embeddings, {0}, accumulate);
  };
  const Tensor grad_embeddings = gradient_for(x.count, anchors_grad);
  const Tensor grad_references = gradient_for(y.count, others && others_grad);

  Course course(kernels, embeddings, call, anchors_grad, others_grad);
  course.mine();
  course.reduce(reduction, loss, totals);
  if (anchors_grad) course.gradient(x, true, !others, grad_embeddings);
  if (others && others_grad) course.gradient(y, false, true, grad_references);
  return {loss, totals, grad_embeddings, grad_references};
}

}  // namespace fused_ops
