#include <torch/library.h>

#include "core/arguments.h"
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
    save_fields(ctx, Saved{x, std::string(approximate)});
    return call_gelu(x, approximate);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = saved_fields<Saved>(ctx);
    const auto& [x, approximate] = saved;
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

 private:
  struct Saved {
    Tensor x;
    std::string approximate;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.x, self.approximate);
    }
  };
};

Tensor gelu_autograd(const Tensor& x, c10::string_view approximate) {
  if (needs_grad(x)) return Gelu::apply(x, approximate);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_gelu(x, approximate);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("gelu", gelu_autograd); }

}  // namespace
}  // namespace shoestring::layers
