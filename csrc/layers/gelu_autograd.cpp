#include <torch/library.h>

#include "core/autograd.h"
#include "core/call.h"
#include "layers/gated.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor call_gelu(const Tensor& x, c10::string_view approximate) {
  static auto op = find<Tensor(const Tensor&, c10::string_view)>("shoestring::gelu");
  return op.call(x, approximate);
}

class Gelu : public torch::autograd::Function<Gelu> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, c10::string_view approximate) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x});
    ctx->saved_data["approximate"] = std::string(approximate);
    return call_gelu(x, approximate);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const Tensor x = ctx->get_saved_variables()[0];
    const auto approximate = ctx->saved_data["approximate"].toStringView();
    if (gated::may_overwrite(grad_outputs[0], x)) {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<void(const Tensor&, Tensor&, c10::string_view)>("shoestring::_gelu_backward_");
      Tensor changed = x.detach();
      op.call(grad_outputs[0], changed, approximate);
      return {changed, Tensor()};
    }
    Tensor gradient;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op =
          find<Tensor(const Tensor&, const Tensor&, c10::string_view)>("shoestring::_gelu_backward");
      gradient = op.call(grad_outputs[0], x, approximate);
    }
    return once_differentiable("gelu", {gradient, Tensor()});
  }
};

Tensor gelu_autograd(const Tensor& x, c10::string_view approximate) {
  if (needs_grad(x)) return Gelu::apply(x, approximate);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_gelu(x, approximate);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("gelu", gelu_autograd); }

}  // namespace
}  // namespace shoestring::layers
