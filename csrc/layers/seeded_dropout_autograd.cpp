#include <torch/library.h>

#include "core/arguments.h"
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
    save_fields(ctx, Saved{seed, p});
    return call_seeded_dropout(x, seed, p);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = saved_fields<Saved>(ctx);
    return {call_seeded_dropout(grad_outputs[0], saved.seed, saved.p), Tensor(), Tensor()};
  }

 private:
  struct Saved {
    Tensor seed;
    double p = 0;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.seed, self.p);
    }
  };
};

Tensor seeded_dropout_autograd(const Tensor& x, const Tensor& seed, double p) {
  if (needs_grad(x)) return SeededDropout::apply(x, seed, p);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_seeded_dropout(x, seed, p);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("seeded_dropout", seeded_dropout_autograd); }

}  // namespace
}  // namespace shoestring::layers
