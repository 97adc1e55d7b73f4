#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/arguments.h"
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

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("embedding", embedding_autograd); }

}  // namespace
}  // namespace shoestring::layers
