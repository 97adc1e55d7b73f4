#include <tuple>

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

Tensor call_geglu(const Tensor& gate, const Tensor& up, c10::string_view approximate) {
  static auto op = find<Tensor(const Tensor&, const Tensor&, c10::string_view)>("shoestring::geglu");
  return op.call(gate, up, approximate);
}

class Geglu : public torch::autograd::Function<Geglu> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up,
                        c10::string_view approximate) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_fields(ctx, Saved{gate, up, std::string(approximate)});
    return call_geglu(gate, up, approximate);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = saved_fields<Saved>(ctx);
    if (gated::may_overwrite(grad_outputs[0], saved.gate, saved.up)) {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op =
          find<void(const Tensor&, Tensor&, Tensor&, c10::string_view)>("shoestring::_geglu_backward_");
      Tensor gate = saved.gate.detach(), up = saved.up.detach();
      op.call(grad_outputs[0], gate, up, saved.approximate);
      return {gate, up, Tensor()};
    }
    std::tuple<Tensor, Tensor> gradients;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op =
          find<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, c10::string_view)>(
              "shoestring::_geglu_backward");
      gradients = op.call(grad_outputs[0], saved.gate, saved.up, saved.approximate);
    }
    return once_differentiable("geglu", {std::get<0>(gradients), std::get<1>(gradients), Tensor()});
  }

 private:
  struct Saved {
    Tensor gate, up;
    std::string approximate;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.gate, self.up, self.approximate);
    }
  };
};

Tensor geglu_autograd(const Tensor& gate, const Tensor& up, c10::string_view approximate) {
  if (needs_grad(gate, up)) return Geglu::apply(gate, up, approximate);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_geglu(gate, up, approximate);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("geglu", geglu_autograd); }

}  // namespace
}  // namespace shoestring::layers
