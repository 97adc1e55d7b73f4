#include <tuple>

#include <torch/library.h>

#include "core/autograd.h"
#include "core/call.h"
#include "layers/gated.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor call_swiglu(const Tensor& gate, const Tensor& up) {
  static auto op = find<Tensor(const Tensor&, const Tensor&)>("shoestring::swiglu");
  return op.call(gate, up);
}

class Swiglu : public torch::autograd::Function<Swiglu> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({gate, up});
    return call_swiglu(gate, up);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const variable_list saved = ctx->get_saved_variables();
    if (gated::may_overwrite(grad_outputs[0], saved[0], saved[1])) {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<void(const Tensor&, Tensor&, Tensor&)>("shoestring::_swiglu_backward_");
      Tensor gate = saved[0].detach(), up = saved[1].detach();
      op.call(grad_outputs[0], gate, up);
      return {gate, up};
    }
    std::tuple<Tensor, Tensor> gradients;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&)>(
          "shoestring::_swiglu_backward");
      gradients = op.call(grad_outputs[0], saved[0], saved[1]);
    }
    return once_differentiable("swiglu", {std::get<0>(gradients), std::get<1>(gradients)});
  }
};

Tensor swiglu_autograd(const Tensor& gate, const Tensor& up) {
  if (needs_grad(gate, up)) return Swiglu::apply(gate, up);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_swiglu(gate, up);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("swiglu", swiglu_autograd); }

}  // namespace
}  // namespace shoestring::layers
