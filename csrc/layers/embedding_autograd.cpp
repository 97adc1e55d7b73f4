#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/autograd.h"
#include "core/call.h"
#include "layers/embedding.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
    ctx->save_for_backward({ids});
    ctx->saved_data["rows"] = weight.sym_size(0);
    ctx->saved_data["padding_idx"] = padding_idx;
    ctx->saved_data["scale_grad_by_freq"] = scale_grad_by_freq;
    return call_embedding(ids, weight, padding_idx, scale_grad_by_freq);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const Tensor ids = ctx->get_saved_variables()[0], grad = grad_outputs[0];
    const auto rows = ctx->saved_data["rows"].toSymInt();
    const auto padding_idx = ctx->saved_data["padding_idx"].toOptional<int64_t>();
    const bool by_frequency = ctx->saved_data["scale_grad_by_freq"].toBool();
    variable_list gradients(4);
    if (at::GradMode::is_enabled()) {
      gradients[1] =
          at::embedding_dense_backward_symint(grad, ids, rows, padding_idx.value_or(-1), by_frequency);
      return gradients;
    }
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find<EmbeddingBackwardSignature>("shoestring::_embedding_backward");
    gradients[1] = op.call(grad, ids, rows, padding_idx, by_frequency);
    return gradients;
  }
};

Tensor embedding_autograd(const Tensor& ids, const Tensor& weight, std::optional<int64_t> padding_idx,
                          bool scale_grad_by_freq) {
  if (needs_grad(weight)) return Embedding::apply(ids, weight, padding_idx, scale_grad_by_freq);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_embedding(ids, weight, padding_idx, scale_grad_by_freq);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("embedding", embedding_autograd); }

}  // namespace
}  // namespace shoestring::layers
