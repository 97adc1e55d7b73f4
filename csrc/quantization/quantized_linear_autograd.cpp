#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "core/device.h"

namespace shoestring::quantization {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

using QuantizedLinearSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                        const OptionalTensor&, c10::SymInt, c10::string_view, int64_t);
using QuantizedLinearBackwardSignature = Tensor(const Tensor&, const Tensor&, const Tensor&,
                                                const OptionalTensor&, c10::SymInt, c10::string_view,
                                                int64_t);

// The autograd function of quantized_linear. The weight is frozen: only x and the bias receive gradients. The
// function does not save x.
class QuantizedLinear : public torch::autograd::Function<QuantizedLinear> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& packed, const Tensor& absmax,
                        const OptionalTensor& nested, const OptionalTensor& bias, c10::SymInt out_features,
                        std::string quant_type, int64_t block_size) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find<QuantizedLinearSignature>("shoestring::quantized_linear");
    save_fields(ctx, Saved{packed, absmax, nested, x.sym_size(-1), quant_type, block_size, x.requires_grad(),
                           wants_grad(bias), bias ? bias->scalar_type() : at::kFloat});
    return op.call(x, packed, absmax, nested, bias, out_features, quant_type, block_size);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const Tensor& grad = grad_outputs[0];
    const auto saved = saved_fields<Saved>(ctx);
    variable_list gradients(2);
    {
      at::AutoDispatchBelowADInplaceOrView below;
      if (saved.by_x) {
        static auto op = find<QuantizedLinearBackwardSignature>("shoestring::_quantized_linear_backward");
        gradients[0] = op.call(grad, saved.packed, saved.absmax, saved.nested, saved.in_features,
                               saved.quant_type, saved.block_size);
      }
      if (saved.by_bias) gradients[1] = sum_to_bias(grad, saved.bias_type);
    }
    gradients = once_differentiable("quantized_linear", std::move(gradients));
    Tensor none;
    return {gradients[0], none, none, none, gradients[1], none, none, none};
  }

 private:
  struct Saved {
    Tensor packed, absmax;
    OptionalTensor nested;
    c10::SymInt in_features;
    std::string quant_type;
    int64_t block_size = 0;
    // by_x, by_bias: whether x and the bias need a gradient
    bool by_x = false, by_bias = false;
    at::ScalarType bias_type = at::kFloat;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.packed, self.absmax, self.nested, self.in_features, self.quant_type, self.block_size,
                 self.by_x, self.by_bias, self.bias_type);
    }
  };
};

Tensor quantized_linear_autograd(const Tensor& x, const Tensor& packed, const Tensor& absmax,
                                 const OptionalTensor& nested, const OptionalTensor& bias,
                                 c10::SymInt out_features, c10::string_view quant_type, int64_t block_size) {
  if (!needs_grad(x, bias.value_or(Tensor(x)))) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find<QuantizedLinearSignature>("shoestring::quantized_linear");
    return op.call(x, packed, absmax, nested, bias, std::move(out_features), quant_type, block_size);
  }
  return QuantizedLinear::apply(x, packed, absmax, nested, bias, std::move(out_features),
                                std::string(quant_type), block_size);
}

// Under autocast, x and the result have the autocast dtype, as in a linear layer.
template <c10::DeviceType device>
Tensor quantized_linear_autocast(const Tensor& x, const Tensor& packed, const Tensor& absmax,
                                 const OptionalTensor& nested, const OptionalTensor& bias,
                                 c10::SymInt out_features, c10::string_view quant_type, int64_t block_size) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  static auto op = find<QuantizedLinearSignature>("shoestring::quantized_linear");
  return op.call(at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), x, device), packed,
                 absmax, nested, bias, std::move(out_features), quant_type, block_size);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("quantized_linear", quantized_linear_autograd); }
const AutocastRules quantized_linear_rules([](torch::Library& m, auto device) {
  m.impl("quantized_linear", quantized_linear_autocast<device>);
});

}  // namespace
}  // namespace shoestring::quantization
