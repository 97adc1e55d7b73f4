#include <torch/library.h>

#include "core/autograd.h"
#include "core/call.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor call_seeded_dropout(const Tensor& x, const Tensor& seed, double p) {
  static auto op = find<Tensor(const Tensor&, const Tensor&, double)>("shoestring::seeded_dropout");
  return op.call(x, seed, p);
}

// Autograd of seeded_dropout. Its backward applies the same mask and scale to the gradient, so it is again
// seeded_dropout and differentiable.
class SeededDropout : public torch::autograd::Function<SeededDropout> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& seed, double p) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({seed});
    ctx->saved_data["p"] = p;
    return call_seeded_dropout(x, seed, p);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    return {
        call_seeded_dropout(grad_outputs[0], ctx->get_saved_variables()[0], ctx->saved_data["p"].toDouble()),
        Tensor(), Tensor()};
  }
};

Tensor seeded_dropout_autograd(const Tensor& x, const Tensor& seed, double p) {
  if (needs_grad(x)) return SeededDropout::apply(x, seed, p);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_seeded_dropout(x, seed, p);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("seeded_dropout", seeded_dropout_autograd); }

}  // namespace
}  // namespace shoestring::layers
