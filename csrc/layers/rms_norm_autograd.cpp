#include <tuple>

#include <torch/library.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "layers/norm.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using norm::OptionalTensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Autograd of rms_norm and add_rms_norm. Saves the tensor that is normalised (x, or the result x + residual),
// the weight and rstd of each row.
class RmsNorm : public torch::autograd::Function<RmsNorm> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, double eps, double offset,
                               c10::string_view upcast, c10::optional<at::ScalarType> out_dtype) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [y, sum, rstd] =
        norm::call_rms_norm_forward(x, residual, weight, eps, offset, upcast, out_dtype);
    ctx->set_materialize_grads(false);
    const bool narrow = residual.has_value() && x.scalar_type() != residual->scalar_type();
    save_fields(ctx, Saved{residual.has_value() ? sum : x, weight, rstd, offset, wants_grad(weight), narrow,
                           x.scalar_type()});
    if (!residual.has_value()) return {y};
    return {y, sum};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const auto saved = saved_fields<Saved>(ctx);
    Tensor grad_sum = upstream.size() > 1 ? upstream[1] : Tensor(), grad_x, grad_weight;
    if (upstream[0].defined()) {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op =
          find<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const Tensor&,
                                                  const OptionalTensor&, const Tensor&, double, bool, bool)>(
              "shoestring::_rms_norm_backward");
      std::tie(grad_sum, grad_weight, grad_x) =
          op.call(upstream[0], as_optional(grad_sum), saved.normalised, saved.weight, saved.rstd,
                  saved.offset, saved.weight_grad, saved.narrow);
      if (!saved.weight_grad) grad_weight = Tensor();
    } else if (saved.narrow && grad_sum.defined()) {
      grad_x = grad_sum.to(saved.dtype);
    }
    if (!saved.narrow) grad_x = grad_sum;
    variable_list g = once_differentiable("rms_norm", {grad_x, grad_sum, grad_weight});
    return {saved.narrow ? g[0] : g[1], upstream.size() > 1 ? g[1] : Tensor(), g[2], {}, {}, {}, {}};
  }

 private:
  struct Saved {
    Tensor normalised;
    OptionalTensor weight;
    Tensor rstd;
    double offset = 0;
    bool weight_grad = false;
    bool narrow = false;  // whether x has another dtype than the residual
    at::ScalarType dtype = at::kFloat;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.normalised, self.weight, self.rstd, self.offset, self.weight_grad, self.narrow,
                 self.dtype);
    }
  };
};

Tensor rms_norm_autograd(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
                         c10::string_view upcast, c10::optional<at::ScalarType> out_dtype) {
  if (needs_grad(x, weight.value_or(Tensor())))
    return RmsNorm::apply(x, OptionalTensor(), weight, eps, offset, upcast, out_dtype)[0];
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(rms_norm_autograd)>("shoestring::rms_norm");
  return op.call(x, weight, eps, offset, upcast, out_dtype);
}

std::tuple<Tensor, Tensor> add_rms_norm_autograd(const Tensor& x, const Tensor& residual,
                                                 const OptionalTensor& weight, double eps, double offset,
                                                 c10::string_view upcast,
                                                 c10::optional<at::ScalarType> out_dtype) {
  if (needs_grad(x, residual, weight.value_or(Tensor()))) {
    const variable_list results =
        RmsNorm::apply(x, OptionalTensor(residual), weight, eps, offset, upcast, out_dtype);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(add_rms_norm_autograd)>("shoestring::add_rms_norm");
  return op.call(x, residual, weight, eps, offset, upcast, out_dtype);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("rms_norm", rms_norm_autograd);
  m.impl("add_rms_norm", add_rms_norm_autograd);
}

}  // namespace
}  // namespace shoestring::layers
