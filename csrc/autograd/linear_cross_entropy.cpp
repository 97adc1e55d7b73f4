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
using Mask = std::array<bool, 3>;

using Op = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, int64_t, c10::string_view, double,
                  double, int64_t);
using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                           const OptionalTensor&, int64_t, c10::string_view, double,
                                                           double, int64_t, Mask);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                    const OptionalTensor&, int64_t, c10::string_view, double, double,
                                                    int64_t, Mask);

// A scalar loss has a scalar upstream gradient, so the gradients are made in forward, while the logits are there, and
// only multiplied in backward: three matrix products in all. reduction='none' has one upstream gradient per token,
// known only in backward, and computes the logits a second time.
class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight, const Tensor& target,
                        const OptionalTensor& bias, int64_t ignore_index, std::string reduction,
                        double label_smoothing, double softcap, int64_t workspace_mb) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Mask mask{hidden.requires_grad(), weight.requires_grad(), bias.has_value() && bias->requires_grad()};
    const bool deferred = reduction == "none";
    static auto op = find<Forward>("shoestring::linear_cross_entropy_forward");
    auto [loss, grad_hidden, grad_weight, grad_bias] =
        op.call(hidden, weight, target, bias, ignore_index, reduction, label_smoothing, softcap, workspace_mb,
                deferred ? Mask{false, false, false} : mask);
    ctx->saved_data["deferred"] = deferred;
    for (int i = 0; i < 3; ++i) ctx->saved_data["mask" + std::to_string(i)] = mask[i];
    if (deferred) {
      ctx->save_for_backward({hidden, weight, target, bias.value_or(Tensor())});
      ctx->saved_data["ignore_index"] = ignore_index;
      ctx->saved_data["label_smoothing"] = label_smoothing;
      ctx->saved_data["softcap"] = softcap;
      ctx->saved_data["workspace_mb"] = workspace_mb;
    } else {
      ctx->save_for_backward({grad_hidden, grad_weight, grad_bias});
    }
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const Tensor& upstream = grad_outputs[0];
    variable_list saved = ctx->get_saved_variables();
    Mask mask;
    for (int i = 0; i < 3; ++i) mask[i] = ctx->saved_data["mask" + std::to_string(i)].toBool();

    variable_list gradients(3);
    if (ctx->saved_data["deferred"].toBool()) {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<Backward>("shoestring::linear_cross_entropy_backward");
      std::tie(gradients[0], gradients[1], gradients[2]) =
          op.call(upstream, saved[0], saved[1], saved[2], saved[3].defined() ? OptionalTensor(saved[3]) : std::nullopt,
                  ctx->saved_data["ignore_index"].toInt(), "none", ctx->saved_data["label_smoothing"].toDouble(),
                  ctx->saved_data["softcap"].toDouble(), ctx->saved_data["workspace_mb"].toInt(), mask);
    } else {
      at::NoGradGuard no_grad;
      // The saved tensor, and one of these two names for it, are all that hold the gradient from here on.
      for (int i = 0; i < 3; ++i) {
        if (mask[i]) gradients[i] = scale_gradient(saved[i], upstream);
      }
    }
    for (int i = 0; i < 3; ++i) {
      if (!mask[i]) gradients[i] = Tensor();
    }
    gradients = once_differentiable("linear_cross_entropy", std::move(gradients));
    Tensor none;
    return {gradients[0], gradients[1], none, gradients[2], none, none, none, none, none};
  }
};

Tensor autograd(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                int64_t ignore_index, c10::string_view reduction, double label_smoothing, double softcap,
                int64_t workspace_mb) {
  if (!needs_grad(hidden, weight, bias.value_or(Tensor(hidden)))) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find<Op>("shoestring::linear_cross_entropy");
    return op.call(hidden, weight, target, bias, ignore_index, reduction, label_smoothing, softcap, workspace_mb);
  }
  return LinearCrossEntropy::apply(hidden, weight, target, bias, ignore_index, std::string(reduction), label_smoothing,
                                   softcap, workspace_mb);
}

// Under autocast the operands take the autocast dtype, as for a linear layer; the loss is fp32 whatever they are.
template <c10::DeviceType device>
Tensor autocast(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                int64_t ignore_index, c10::string_view reduction, double label_smoothing, double softcap,
                int64_t workspace_mb) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto cast = [dtype = at::autocast::get_autocast_dtype(device)](const Tensor& t) {
    return at::autocast::cached_cast(dtype, t, device);
  };
  static auto op = find<Op>("shoestring::linear_cross_entropy");
  return op.call(cast(hidden), cast(weight), target, bias.has_value() ? OptionalTensor(cast(*bias)) : bias,
                 ignore_index, reduction, label_smoothing, softcap, workspace_mb);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("linear_cross_entropy", autograd); }
TORCH_LIBRARY_IMPL(shoestring, AutocastCPU, m) { m.impl("linear_cross_entropy", autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(shoestring, AutocastCUDA, m) { m.impl("linear_cross_entropy", autocast<at::kCUDA>); }

}  // namespace
}  // namespace shoestring
