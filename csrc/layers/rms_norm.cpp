#include <tuple>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/layers/ops.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "layers/norm.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using norm::OptionalTensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using OptionalType = c10::optional<at::ScalarType>;

constexpr const char* kRmsNormOp = "rms_norm";

kernels::Upcast rms_norm_upcast(c10::string_view name) {
  if (name == "llama") return kernels::Upcast::kLlama;
  if (name == "gemma") return kernels::Upcast::kGemma;
  TORCH_CHECK(name == "none", kRmsNormOp, ": upcast: expected 'llama', 'gemma' or 'none', received '", name,
              "'");
  return kernels::Upcast::kNone;
}

void check_rms_norm(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, double eps,
                    c10::string_view upcast, OptionalType out_dtype) {
  norm::check_x(kRmsNormOp, x, eps);
  norm::check_vector(kRmsNormOp, "weight", x, weight);
  rms_norm_upcast(upcast);
  norm::check_residual(kRmsNormOp, x, residual, out_dtype,
                       ". With out_dtype the dtype of x, the residual may be fp32.");
  norm::check_out_dtype(kRmsNormOp, x, residual, out_dtype);
}

template <Backend backend>
std::tuple<Tensor, Tensor, Tensor> rms_norm_forward(const Tensor& x, const OptionalTensor& residual,
                                                    const OptionalTensor& weight, double eps, double offset,
                                                    c10::string_view upcast, OptionalType out_dtype) {
  check_rms_norm(x, residual, weight, eps, upcast, out_dtype);
  norm::Options options{eps, offset, rms_norm_upcast(upcast)};
  options.out_dtype = out_dtype;
  const auto r = norm::forward(backend, kRmsNormOp, x, residual, weight, std::nullopt, options);
  return {r.y, norm::or_none(r.sum, residual.value_or(x)), r.rstd};
}

template <Backend backend>
std::tuple<Tensor, Tensor, Tensor> rms_norm_backward(const Tensor& grad, const OptionalTensor& grad_sum,
                                                     const Tensor& x, const OptionalTensor& weight,
                                                     const Tensor& rstd, double offset, bool weight_grad,
                                                     bool rounded_x) {
  const auto r = norm::backward(backend, kRmsNormOp, grad, grad_sum, x, weight, Tensor(), rstd, {0, offset},
                                weight_grad, std::nullopt, rounded_x);
  return {r.x, norm::or_none(r.weight, x), norm::or_none(r.rounded_x, grad)};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_forward_meta(const Tensor& x, const OptionalTensor& residual,
                                                         const OptionalTensor& weight, double eps,
                                                         double offset, c10::string_view upcast,
                                                         OptionalType out_dtype) {
  check_rms_norm(x, residual, weight, eps, upcast, out_dtype);
  const auto rows = x.sym_sizes().slice(0, x.dim() - 1);
  const auto options = residual.value_or(x).options();
  return {at::empty_symint(x.sym_sizes(), out_dtype ? options.dtype(*out_dtype) : options),
          residual.has_value() ? at::empty_symint(x.sym_sizes(), options) : at::empty({0}, options),
          at::empty_symint(rows, options.dtype(norm::statistics_type(residual.value_or(x))))};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_backward_meta(const Tensor& grad, const OptionalTensor& grad_sum,
                                                          const Tensor& x, const OptionalTensor& weight,
                                                          const Tensor& rstd, double offset, bool weight_grad,
                                                          bool rounded_x) {
  return {
      at::empty_symint(x.sym_sizes(), x.options()),
      weight_grad ? at::empty_symint(weight->sym_sizes(), weight->options()) : at::empty({0}, x.options()),
      rounded_x ? at::empty_symint(x.sym_sizes(), grad.options()) : at::empty({0}, grad.options())};
}

// Implement rms_norm and add_rms_norm if no gradient is needed. They call _rms_norm_forward and drop results
// that only backward needs.
Tensor rms_norm_composite(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
                          c10::string_view upcast, OptionalType out_dtype) {
  return std::get<0>(norm::call_rms_norm_forward(x, std::nullopt, weight, eps, offset, upcast, out_dtype));
}
std::tuple<Tensor, Tensor> add_rms_norm_composite(const Tensor& x, const Tensor& residual,
                                                  const OptionalTensor& weight, double eps, double offset,
                                                  c10::string_view upcast, OptionalType out_dtype) {
  const auto result = norm::call_rms_norm_forward(x, residual, weight, eps, offset, upcast, out_dtype);
  return {std::get<0>(result), std::get<1>(result)};
}

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

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // rms_norm returns y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension. add_rms_norm
  // normalises x + residual and also returns this sum. weight: (features), of any floating-point dtype.
  // upcast: the values that are rounded to a 16-bit dtype before the multiplication by the weight. 'llama':
  // the normalised x. 'gemma': none. 'none': the reciprocal root, the normalised x and the weight.
  // With out_dtype, y has that dtype: bf16 or fp16 for rows of fp32. x of that dtype may then be added to a
  // residual of fp32.
  m.def(R"(rms_norm(Tensor x, Tensor? weight=None, *, float eps, float offset=0.,
      str upcast='llama', ScalarType? out_dtype=None) -> Tensor)");
  m.def(R"(add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, *, float eps, float offset=0.,
      str upcast='llama', ScalarType? out_dtype=None) -> (Tensor y, Tensor sum))");
  // _rms_norm_forward and _rms_norm_backward compute rms_norm and add_rms_norm and their gradients. sum is x
  // + residual; it is empty without a residual. rstd has one value per row, fp64 for fp64, else fp32.
  // grad_sum, the gradient of sum, is added to grad_x. grad_weight is empty if it is not wanted.
  // rounded_grad_x is grad_x in the dtype of grad_y; it is empty unless rounded_x is true.
  m.def(R"(_rms_norm_forward(Tensor x, Tensor? residual, Tensor? weight, float eps, float offset,
      str upcast, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum, Tensor rstd))");
  m.def(R"(_rms_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor rstd,
      float offset, bool weight_grad, bool rounded_x=False) -> (Tensor grad_x, Tensor grad_weight,
      Tensor rounded_grad_x))");
}
TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("_rms_norm_forward", rms_norm_forward<Backend::kCpu>);
  m.impl("_rms_norm_backward", rms_norm_backward<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("_rms_norm_forward", rms_norm_forward<Backend::kCuda>);
  m.impl("_rms_norm_backward", rms_norm_backward<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("_rms_norm_forward", rms_norm_forward_meta);
  m.impl("_rms_norm_backward", rms_norm_backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("rms_norm", rms_norm_composite);
  m.impl("add_rms_norm", add_rms_norm_composite);
}
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("rms_norm", rms_norm_autograd);
  m.impl("add_rms_norm", add_rms_norm_autograd);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> norm::call_rms_norm_forward(const Tensor& x,
                                                               const OptionalTensor& residual,
                                                               const OptionalTensor& weight, double eps,
                                                               double offset, c10::string_view upcast,
                                                               OptionalType out_dtype) {
  static auto op = find<decltype(rms_norm_forward_meta)>("shoestring::_rms_norm_forward");
  return op.call(x, residual, weight, eps, offset, upcast, out_dtype);
}

}  // namespace shoestring::layers

namespace shoestring {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, const RMSNormOptions& options) {
  static auto op = find<decltype(layers::rms_norm_composite)>("shoestring::rms_norm");
  return op.call(x, weight, options.eps(), options.offset(), options.upcast(), options.out_dtype());
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        const RMSNormOptions& options) {
  static auto op = find<decltype(layers::add_rms_norm_composite)>("shoestring::add_rms_norm");
  return op.call(x, residual, weight, options.eps(), options.offset(), options.upcast(), options.out_dtype());
}

}  // namespace shoestring
