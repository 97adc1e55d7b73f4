// GELU and the linear layer after it, which saves the input of GELU instead of its input and its result.

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "core/device.h"
#include "core/huge_pages.h"
#include "core/saved_view.h"
#include "gemm/linear.h"

namespace shoestring::blocks {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;
using OptionalType = std::optional<at::ScalarType>;

Tensor call_gelu(const Tensor& x, c10::string_view approximate) {
  static auto op = find<Tensor(const Tensor&, c10::string_view)>("shoestring::gelu");
  return op.call(x, approximate);
}

Tensor gelu_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   c10::string_view approximate, OptionalType dtype, int64_t library) {
  static auto op = find<gemm::LinearSignature>("shoestring::linear");
  return op.call(call_gelu(x, approximate), weight, bias, std::nullopt, dtype, library);
}

Tensor call_gelu_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        c10::string_view approximate, OptionalType dtype, int64_t library) {
  static auto op = find<decltype(gelu_linear)>("shoestring::_gelu_linear");
  return op.call(x, weight, bias, approximate, dtype, library);
}

class GeluLinear : public torch::autograd::Function<GeluLinear> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, c10::string_view approximate, OptionalType dtype,
                        int64_t library) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_fields(ctx, Saved{x, weight, std::string(approximate), dtype.value_or(x.scalar_type()), library,
                           x.requires_grad(), weight.requires_grad(), wants_grad(bias),
                           bias ? bias->scalar_type() : at::kFloat});
    return call_gelu_linear(x, weight, bias, approximate, dtype, library);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const auto saved = saved_fields<Saved>(ctx);
    const Tensor &x = saved.x, &weight = saved.weight, &grad = upstream[0];
    Tensor grad_x, grad_weight, grad_bias, h;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto products = find<gemm::LinearGroupBackwardSignature>("shoestring::_linear_group_backward");
      const auto product = [&](const OptionalTensor& activation, size_t which) {
        return products.call(gemm::OptionalTensors({OptionalTensor(grad)}), activation, {weight}, saved.type,
                             x.scalar_type(), saved.library,
                             c10::List<bool>({which == 0, which == 1}))[which];
      };
      if (saved.of_x) {
        // The gradient of gelu(x) has memory of its own, in which gelu(x) replaces it.
        static auto both = find<void(Tensor&, const Tensor&, Tensor&, c10::string_view)>(
            "shoestring::_gelu_backward_value_");
        h = product(std::nullopt, 0);
        if (used_once(grad) && only_saved_view(x)) {
          grad_x = x.detach();
        } else {
          grad_x = at::empty_like(x, x.options(), at::MemoryFormat::Contiguous);
          if (!is_traced(grad_x)) grad_x = in_huge_pages(grad_x);
        }
        both.call(h, x, grad_x, saved.approximate);
      } else if (saved.of_weight) {
        h = call_gelu(x, saved.approximate);
      }
      if (saved.of_weight) grad_weight = product(h.to(saved.type), 1);
      if (saved.of_bias) grad_bias = sum_to_bias(grad, saved.bias_type);
    }
    variable_list gradients = once_differentiable("_gelu_linear", {grad_x, grad_weight, grad_bias});
    gradients.resize(6);
    return gradients;
  }

 private:
  struct Saved {
    Tensor x, weight;
    std::string approximate;
    at::ScalarType type = at::kFloat;  // dtype of the product
    int64_t library = 0;
    bool of_x = false, of_weight = false, of_bias = false;  // whether the input needs a gradient
    at::ScalarType bias_type = at::kFloat;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.x, self.weight, self.approximate, self.type, self.library, self.of_x, self.of_weight,
                 self.of_bias, self.bias_type);
    }
  };
};

Tensor gelu_linear_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            c10::string_view approximate, OptionalType dtype, int64_t library) {
  if (needs_grad(x, weight) || (at::GradMode::is_enabled() && wants_grad(bias)))
    return GeluLinear::apply(x, weight, bias, approximate, dtype, library);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_gelu_linear(x, weight, bias, approximate, dtype, library);
}

template <c10::DeviceType device>
Tensor gelu_linear_autocast(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            c10::string_view approximate, OptionalType dtype, int64_t library) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  return call_gelu_linear(x, weight, bias, approximate, gemm::autocast_type<device>(x, dtype), library);
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) { m.impl("_gelu_linear", gelu_linear); }
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("_gelu_linear", gelu_linear_autograd); }
const AutocastRules gelu_linear_rules([](torch::Library& m, auto device) {
  m.impl("_gelu_linear", gelu_linear_autocast<device>);
});

}  // namespace
}  // namespace shoestring::blocks
