// Embeddings with a dense gradient of the weight. On the CPU, backward sorts the ids by row. It then writes
// each row once: zeros, or the sum of the row's gradients in the order of the ids. Each row belongs to one
// thread, so the result does not depend on the number of threads.

#include "layers/embedding.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <shoestring/layers/embedding.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "core/huge_pages.h"
#include "core/tensors.h"
#include "core/threads.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check_embedding_ids(const char* op, const Tensor& ids, const c10::SymInt& rows,
                         std::optional<int64_t> padding_idx) {
  TORCH_CHECK(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, op,
              ": ids: expected int64 or int32, received ", ids.scalar_type());
  TORCH_CHECK(!padding_idx.has_value() || (*padding_idx >= 0 && rows > *padding_idx), op,
              ": padding_idx: expected None or a row of the weight, at least 0 and less than ", rows,
              ", received ", padding_idx.value_or(0));
}

void check_embedding(const Tensor& ids, const Tensor& weight, std::optional<int64_t> padding_idx) {
  TORCH_CHECK(weight.dim() == 2, kEmbeddingOp, ": weight: expected shape (rows, features), received ",
              weight.sym_sizes());
  TORCH_CHECK(is_supported_float(weight.scalar_type()), kEmbeddingOp,
              ": weight: expected fp32, fp64, bf16 or fp16, received ", weight.scalar_type());
  TORCH_CHECK(ids.device() == weight.device(), kEmbeddingOp, ": ids: expected a tensor on ", weight.device(),
              ", received one on ", ids.device());
  check_embedding_ids(kEmbeddingOp, ids, weight.sym_size(0), padding_idx);
}

void check_embedding_backward(const Tensor& grad, const Tensor& ids, const c10::SymInt& rows,
                              std::optional<int64_t> padding_idx) {
  auto shape = ids.sym_sizes().vec();
  if (grad.dim() > 0) shape.push_back(grad.sym_size(-1));
  TORCH_CHECK(grad.dim() > 0 && grad.sym_sizes() == shape && grad.device() == ids.device(),
              kEmbeddingBackwardOp, ": grad_output: expected the shape of ids and a last dimension, ",
              c10::SymIntArrayRef(shape), ", on ", ids.device(), ", received ", grad.sym_sizes(), " on ",
              grad.device());
  TORCH_CHECK(is_supported_float(grad.scalar_type()), kEmbeddingBackwardOp,
              ": grad_output: expected fp32, fp64, bf16 or fp16, received ", grad.scalar_type());
  TORCH_CHECK(rows >= 0, kEmbeddingBackwardOp, ": rows: expected at least 0, received ", rows);
  check_embedding_ids(kEmbeddingBackwardOp, ids, rows, padding_idx);
}

// Returns the ids of CPU tensors as contiguous int64. Raises an error for an id that is no row.
Tensor checked_ids(const char* op, const Tensor& ids, int64_t rows) {
  const Tensor all = ids.to(at::kLong).contiguous();
  const int64_t* from = all.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < all.numel(); ++i) {
    TORCH_CHECK_INDEX(from[i] >= 0 && from[i] < rows, op,
                      ": ids: expected rows of the weight, at least 0 and "
                      "less than ",
                      rows, ", received ", from[i]);
  }
  return all;
}

// The positions of the ids, sorted by row. Those of row r are order[first[r]] to order[first[r + 1] - 1], in
// ascending order.
struct SortedIds {
  SortedIds(const Tensor& ids, int64_t rows, std::optional<int64_t> skipped)
      : first(rows + 2), order(ids.numel()) {
    const int64_t* from = ids.const_data_ptr<int64_t>();
    const int64_t count = ids.numel(), skip = skipped.value_or(-1);
    // While the ids are sorted, first[r + 1] is the next free place of row r.
    for (int64_t i = 0; i < count; ++i) first[from[i] + 2] += from[i] != skip;
    for (int64_t r = 0; r < rows; ++r) first[r + 2] += first[r + 1];
    for (int64_t i = 0; i < count; ++i) {
      if (from[i] != skip) order[first[from[i] + 1]++] = i;
    }
  }
  std::vector<int64_t> first, order;
};

// Writes the sum of the `count` rows of `grad` at the positions `order`, times `scale`. Sum: the type in
// which the rows are added. `room` has space for one row.
template <class T, class Sum>
void add_rows(const T* grad, const int64_t* order, int64_t count, int64_t features, Sum scale, Sum* room,
              T* out) {
  const T* first = grad + order[0] * features;
  if (count == 1 && scale == 1) {
    std::copy_n(first, features, out);
    return;
  }
  for (int64_t d = 0; d < features; ++d) room[d] = static_cast<Sum>(first[d]);
  for (int64_t i = 1; i < count; ++i) {
    const T* from = grad + order[i] * features;
    for (int64_t d = 0; d < features; ++d) room[d] += static_cast<Sum>(from[d]);
  }
  for (int64_t d = 0; d < features; ++d) out[d] = static_cast<T>(room[d] * scale);
}

template <class T, class Sum>
void write_embedding_gradient(const Tensor& grad, const SortedIds& sorted, bool by_frequency,
                              const Tensor& out) {
  const int64_t rows = out.size(0), features = out.size(1);
  const T* from = grad.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  const int64_t bytes = features * static_cast<int64_t>(sizeof(T));
  at::parallel_for(0, rows, row_grain(bytes), [&](int64_t begin, int64_t end) {
    std::vector<Sum> room(features);
    int64_t empty = begin;  // the rows from `empty` up to r have no ids, and are not written yet
    for (int64_t r = begin; r < end; ++r) {
      const int64_t offset = sorted.first[r], count = sorted.first[r + 1] - offset;
      if (count == 0) continue;
      std::memset(to + empty * features, 0, (r - empty) * bytes);
      empty = r + 1;
      add_rows<T, Sum>(from, sorted.order.data() + offset, count, features,
                       by_frequency ? Sum{1} / static_cast<Sum>(count) : Sum{1}, room.data(),
                       to + r * features);
    }
    std::memset(to + empty * features, 0, (end - empty) * bytes);
  });
}

Tensor embedding_cpu(const Tensor& ids, const Tensor& weight, std::optional<int64_t> padding_idx, bool) {
  check_embedding(ids, weight, padding_idx);
  return at::embedding(weight, checked_ids(kEmbeddingOp, ids, weight.size(0)));
}

Tensor embedding_cuda(const Tensor& ids, const Tensor& weight, std::optional<int64_t> padding_idx, bool) {
  check_embedding(ids, weight, padding_idx);
  const c10::OptionalDeviceGuard guard(weight.device());
  return at::embedding(weight, ids);
}

Tensor embedding_meta(const Tensor& ids, const Tensor& weight, std::optional<int64_t> padding_idx, bool) {
  check_embedding(ids, weight, padding_idx);
  auto shape = ids.sym_sizes().vec();
  shape.push_back(weight.sym_size(1));
  return at::empty_symint(shape, weight.options());
}

Tensor embedding_backward_cpu(const Tensor& grad_output, const Tensor& ids, c10::SymInt symbolic_rows,
                              std::optional<int64_t> padding_idx, bool scale_grad_by_freq) {
  check_embedding_backward(grad_output, ids, symbolic_rows, padding_idx);
  const int64_t rows = symbolic_rows.expect_int();
  const SortedIds sorted(checked_ids(kEmbeddingBackwardOp, ids, rows), rows, padding_idx);
  const Tensor grad = grad_output.contiguous();
  Tensor out = in_huge_pages(at::empty({rows, grad.size(-1)}, grad.options()));
  if (out.numel() == 0) return out;
  const auto write = grad.scalar_type() == at::kFloat      ? write_embedding_gradient<float, float>
                     : grad.scalar_type() == at::kDouble   ? write_embedding_gradient<double, double>
                     : grad.scalar_type() == at::kBFloat16 ? write_embedding_gradient<at::BFloat16, float>
                                                           : write_embedding_gradient<at::Half, float>;
  write(grad, sorted, scale_grad_by_freq, out);
  return out;
}

Tensor embedding_backward_cuda(const Tensor& grad_output, const Tensor& ids, c10::SymInt rows,
                               std::optional<int64_t> padding_idx, bool scale_grad_by_freq) {
  check_embedding_backward(grad_output, ids, rows, padding_idx);
  const c10::OptionalDeviceGuard guard(ids.device());
  return at::embedding_dense_backward_symint(grad_output, ids, std::move(rows), padding_idx.value_or(-1),
                                             scale_grad_by_freq);
}

Tensor embedding_backward_meta(const Tensor& grad_output, const Tensor& ids, c10::SymInt rows,
                               std::optional<int64_t> padding_idx, bool) {
  check_embedding_backward(grad_output, ids, rows, padding_idx);
  return at::empty_symint({rows, grad_output.sym_size(-1)}, grad_output.options());
}

Tensor call_embedding(const Tensor& ids, const Tensor& weight, std::optional<int64_t> padding_idx,
                      bool scale_grad_by_freq) {
  static auto op = find<EmbeddingSignature>("shoestring::embedding");
  return op.call(ids, weight, padding_idx, scale_grad_by_freq);
}

// Autograd of embedding. It saves the ids only. With create_graph=True, PyTorch's operator computes the
// gradient, so that it can be differentiated.
class Embedding : public torch::autograd::Function<Embedding> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& ids, const Tensor& weight,
                        std::optional<int64_t> padding_idx, bool scale_grad_by_freq) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_fields(ctx, Saved{ids, weight.sym_size(0), padding_idx, scale_grad_by_freq});
    return call_embedding(ids, weight, padding_idx, scale_grad_by_freq);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = saved_fields<Saved>(ctx);
    const Tensor& grad = grad_outputs[0];
    variable_list gradients(4);
    if (at::GradMode::is_enabled()) {
      gradients[1] = at::embedding_dense_backward_symint(
          grad, saved.ids, saved.rows, saved.padding_idx.value_or(-1), saved.scale_grad_by_freq);
      return gradients;
    }
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find<EmbeddingBackwardSignature>("shoestring::_embedding_backward");
    gradients[1] = op.call(grad, saved.ids, saved.rows, saved.padding_idx, saved.scale_grad_by_freq);
    return gradients;
  }

 private:
  struct Saved {
    Tensor ids;
    c10::SymInt rows;
    std::optional<int64_t> padding_idx;
    bool scale_grad_by_freq = false;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.ids, self.rows, self.padding_idx, self.scale_grad_by_freq);
    }
  };
};

Tensor embedding_autograd(const Tensor& ids, const Tensor& weight, std::optional<int64_t> padding_idx,
                          bool scale_grad_by_freq) {
  if (needs_grad(weight)) return Embedding::apply(ids, weight, padding_idx, scale_grad_by_freq);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_embedding(ids, weight, padding_idx, scale_grad_by_freq);
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // embedding returns the rows ids (any shape, int64 or int32) of weight (rows, features).
  // _embedding_backward returns the dense gradient of the weight. The row padding_idx gets no gradient;
  // scale_grad_by_freq divides the gradient of a row by the number of its ids.
  m.def(R"(embedding(Tensor ids, Tensor weight, *, int? padding_idx=None,
      bool scale_grad_by_freq=False) -> Tensor)");
  m.def(R"(_embedding_backward(Tensor grad_output, Tensor ids, SymInt rows, int? padding_idx,
      bool scale_grad_by_freq) -> Tensor)");
}
TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl(kEmbeddingOp, embedding_cpu);
  m.impl(kEmbeddingBackwardOp, embedding_backward_cpu);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl(kEmbeddingOp, embedding_cuda);
  m.impl(kEmbeddingBackwardOp, embedding_backward_cuda);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl(kEmbeddingOp, embedding_meta);
  m.impl(kEmbeddingBackwardOp, embedding_backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("embedding", embedding_autograd); }

}  // namespace
}  // namespace shoestring::layers

namespace shoestring {

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, const EmbeddingOptions& options) {
  static auto op = find<layers::EmbeddingSignature>("shoestring::embedding");
  return op.call(ids, weight, options.padding_idx(), options.scale_grad_by_freq());
}

}  // namespace shoestring
