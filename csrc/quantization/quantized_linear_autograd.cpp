#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "core/autograd.h"
#include "core/call.h"

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
    ctx->save_for_backward({packed, absmax, nested.value_or(Tensor())});
    ctx->saved_data["in_features"] = x.sym_size(-1);
    ctx->saved_data["quant_type"] = quant_type;
    ctx->saved_data["block_size"] = block_size;
    ctx->saved_data["by_x"] = x.requires_grad();
    ctx->saved_data["by_bias"] = wants_grad(bias);
    if (bias.has_value()) ctx->saved_data["bias_type"] = bias->scalar_type();
    return op.call(x, packed, absmax, nested, bias, out_features, quant_type, block_size);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const Tensor& grad = grad_outputs[0];
    variable_list saved = ctx->get_saved_variables(), gradients(2);
    {
      at::AutoDispatchBelowADInplaceOrView below;
      if (ctx->saved_data["by_x"].toBool()) {
        static auto op = find<QuantizedLinearBackwardSignature>("shoestring::_quantized_linear_backward");
        gradients[0] = op.call(
            grad, saved[0], saved[1], as_optional(saved[2]), ctx->saved_data["in_features"].toSymInt(),
            ctx->saved_data["quant_type"].toStringView(), ctx->saved_data["block_size"].toInt());
      }
      if (ctx->saved_data["by_bias"].toBool()) {
        gradients[1] = sum_to_bias(grad, ctx->saved_data["bias_type"].toScalarType());
      }
    }
    gradients = once_differentiable("quantized_linear", std::move(gradients));
    Tensor none;
    return {gradients[0], none, none, none, gradients[1], none, none, none};
  }
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
TORCH_LIBRARY_IMPL(shoestring, AutocastCPU, m) {
  m.impl("quantized_linear", quantized_linear_autocast<at::kCPU>);
}
TORCH_LIBRARY_IMPL(shoestring, AutocastCUDA, m) {
  m.impl("quantized_linear", quantized_linear_autocast<at::kCUDA>);
}

}  // namespace
}  // namespace shoestring::quantization
