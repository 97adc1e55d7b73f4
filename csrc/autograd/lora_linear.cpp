#include <tuple>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "autograd/common.h"
#include "ops/call.h"

namespace shoestring {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;
using Mask = std::array<bool, 4>;

using Op = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                  const Tensor&, const Tensor&, const OptionalTensor&, double, c10::string_view, int64_t);
using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                           const OptionalTensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                           double, c10::string_view, int64_t);
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                            const OptionalTensor&, const OptionalTensor&, const Tensor&,
                                                            const Tensor&, bool, double, c10::string_view, int64_t,
                                                            Mask);

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// Saves the input of A once, as it came, and low = input A^T (tokens, rank); of the base only the frozen weight.
class LoraLinear : public torch::autograd::Function<LoraLinear> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const OptionalTensor& absmax,
                        const OptionalTensor& nested, const OptionalTensor& bias, const Tensor& lora_A,
                        const Tensor& lora_B, const OptionalTensor& dropped, double scaling, std::string quant_type,
                        int64_t block_size) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find<Forward>("shoestring::lora_linear_forward");
    auto [out, low] = op.call(x, weight, absmax, nested, bias, lora_A, lora_B, dropped, scaling, quant_type, block_size);
    ctx->save_for_backward({dropped.value_or(x), low, weight, absmax.value_or(Tensor()), nested.value_or(Tensor()),
                            lora_A, lora_B});
    const Mask mask{x.requires_grad(), dropped.has_value() && dropped->requires_grad(), lora_A.requires_grad(),
                    lora_B.requires_grad()};
    for (int i = 0; i < 4; ++i) ctx->saved_data["mask" + std::to_string(i)] = mask[i];
    ctx->saved_data["dropout"] = dropped.has_value();
    ctx->saved_data["by_bias"] = bias.has_value() && bias->requires_grad();
    if (bias.has_value()) ctx->saved_data["bias_type"] = bias->scalar_type();
    ctx->saved_data["scaling"] = scaling;
    ctx->saved_data["quant_type"] = quant_type;
    ctx->saved_data["block_size"] = block_size;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const Tensor& grad = grad_outputs[0];
    variable_list saved = ctx->get_saved_variables(), gradients(5);
    Mask mask;
    for (int i = 0; i < 4; ++i) mask[i] = ctx->saved_data["mask" + std::to_string(i)].toBool();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      if (mask[0] || mask[1] || mask[2] || mask[3]) {
        static auto op = find<Backward>("shoestring::lora_linear_backward");
        std::tie(gradients[0], gradients[1], gradients[2], gradients[3]) =
            op.call(grad, saved[0], saved[1], saved[2], optional(saved[3]), optional(saved[4]), saved[5], saved[6],
                    ctx->saved_data["dropout"].toBool(), ctx->saved_data["scaling"].toDouble(),
                    ctx->saved_data["quant_type"].toStringView(), ctx->saved_data["block_size"].toInt(), mask);
      }
      if (ctx->saved_data["by_bias"].toBool()) {
        gradients[4] = sum_to_bias(grad, ctx->saved_data["bias_type"].toScalarType());
      }
    }
    for (int i = 0; i < 4; ++i) {
      if (!mask[i]) gradients[i] = Tensor();
    }
    gradients = once_differentiable("lora_linear", std::move(gradients));
    Tensor none;
    return {gradients[0], none,         none, none, gradients[4], gradients[2],
            gradients[3], gradients[1], none, none, none};
  }
};

Tensor autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& absmax, const OptionalTensor& nested,
                const OptionalTensor& bias, const Tensor& lora_A, const Tensor& lora_B, const OptionalTensor& dropped,
                double scaling, c10::string_view quant_type, int64_t block_size) {
  TORCH_CHECK(!(at::GradMode::is_enabled() && weight.requires_grad()),
              "lora_linear: weight: expected a frozen weight, received one that requires a gradient; call "
              "weight.requires_grad_(False)");
  if (!needs_grad(x, bias.value_or(Tensor(x)), lora_A, lora_B, dropped.value_or(Tensor(x)))) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find<Op>("shoestring::lora_linear");
    return op.call(x, weight, absmax, nested, bias, lora_A, lora_B, dropped, scaling, quant_type, block_size);
  }
  return LoraLinear::apply(x, weight, absmax, nested, bias, lora_A, lora_B, dropped, scaling, std::string(quant_type),
                           block_size);
}

// As for a linear layer: x and a dense weight take the autocast dtype, and so does the result. The adapter stays as it
// is: the operator converts it to what its products are in.
template <c10::DeviceType device>
Tensor autocast(const Tensor& x, const Tensor& weight, const OptionalTensor& absmax, const OptionalTensor& nested,
                const OptionalTensor& bias, const Tensor& lora_A, const Tensor& lora_B, const OptionalTensor& dropped,
                double scaling, c10::string_view quant_type, int64_t block_size) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto cast = [dtype = at::autocast::get_autocast_dtype(device)](const Tensor& t) {
    return at::autocast::cached_cast(dtype, t, device);
  };
  static auto op = find<Op>("shoestring::lora_linear");
  return op.call(cast(x), absmax.has_value() ? weight : cast(weight), absmax, nested, bias, lora_A, lora_B,
                 dropped.has_value() ? OptionalTensor(cast(*dropped)) : dropped, scaling, quant_type, block_size);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("lora_linear", autograd); }
TORCH_LIBRARY_IMPL(shoestring, AutocastCPU, m) { m.impl("lora_linear", autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(shoestring, AutocastCUDA, m) { m.impl("lora_linear", autocast<at::kCUDA>); }

}  // namespace
}  // namespace shoestring
