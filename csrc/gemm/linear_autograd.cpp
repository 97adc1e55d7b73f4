#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "core/device.h"
#include "core/tensors.h"
#include "gemm/linear.h"

namespace shoestring::gemm {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;
using OptionalType = std::optional<at::ScalarType>;

std::vector<Tensor> call_linear_group(const Tensor& x, at::TensorList weights, const OptionalTensors& biases,
                                      OptionalType dtype, int64_t library) {
  static auto op = find<LinearGroupSignature>("shoestring::linear_group");
  return op.call(x, weights, biases, dtype, library);
}

Tensor call_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& residual, OptionalType dtype, int64_t library) {
  static auto op = find<LinearSignature>("shoestring::linear");
  return op.call(x, weight, bias, residual, dtype, library);
}

// Views a tensor (..., features) as (tokens, features), recorded by autograd and with symbolic sizes.
Tensor rows_of(const Tensor& x) { return x.reshape_symint({-1, x.sym_size(-1)}); }

// The autograd function of linear and linear_group. It saves x once for all layers, rounded to the dtype of
// the products. Backward gives grad_x and the gradients of the weights in their own dtypes.
//
// If x is rounded, the rounded x is a second kind of output, which no caller sees. The saved tensor therefore
// has this function as its grad_fn, and double backward reaches x through it.
class Linear : public torch::autograd::Function<Linear> {
 public:
  // tensors: all weights, then all biases that are defined, then the residual if any. biased: for each layer,
  // whether it has a bias.
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList tensors,
                               std::vector<bool> biased, bool has_residual, at::ScalarType type,
                               int64_t library) {
    at::AutoDispatchBelowADInplaceOrView below;
    const size_t count = biased.size();
    const at::TensorList weights = tensors.slice(0, count);
    OptionalTensors biases;
    size_t next = count;
    for (const bool has : biased) biases.push_back(has ? OptionalTensor(tensors[next++]) : std::nullopt);
    const bool by_weight =
        std::any_of(weights.begin(), weights.end(), [](auto& w) { return w.requires_grad(); });
    const Tensor rounded = by_weight && x.scalar_type() != type ? x.to(type) : x;
    variable_list outputs =
        has_residual
            ? variable_list{call_linear(rounded, weights[0], biases.get(0), tensors.back(), type, library)}
            : call_linear_group(rounded, weights, biases, type, library);

    Saved saved{by_weight ? rounded : Tensor(), x.requires_grad(), type, x.scalar_type(), library};
    for (size_t i = 0; i < count; ++i) {
      const OptionalTensor bias = biases.get(i);
      saved.layers.push_back({weights[i], weights[i].requires_grad(), as_added(bias)});
    }
    if (has_residual) saved.residual = as_added(tensors.back());
    saved.count = static_cast<int64_t>(count);
    save_fields(ctx, saved);
    ctx->set_materialize_grads(false);
    if (!rounded.is_same(x)) outputs.push_back(rounded);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = saved_fields<Saved>(ctx);
    const size_t count = saved.layers.size();
    const at::TensorList upstream(grads.data(), count);
    const LinearMask mask = saved.mask(upstream);
    const bool any = mask.x || std::any_of(mask.weights.begin(), mask.weights.end(), std::identity());
    LinearGradients results(count);
    if (any && at::GradMode::is_enabled()) {
      results = differentiable(saved, upstream, mask);
    } else if (any) {
      at::AutoDispatchBelowADInplaceOrView below;
      results = saved.gradients(upstream, mask);
    }
    // the gradient of the rounded x, which only double backward gives
    if (grads.size() > count && grads[count].defined() && saved.wants_x) {
      const Tensor more = grads[count].to(saved.x_type);
      results.x = results.x.defined() ? results.x + more : more;
    }
    // One gradient for each argument of forward: x, each tensor in `tensors`, and four arguments that have
    // none.
    variable_list gradients;
    results.append_to(gradients);
    for (size_t i = 0; i < count; ++i) {
      const Added& bias = saved.layers[i].bias;
      if (bias.is_defined)
        gradients.push_back(bias.wants(upstream[i]) ? sum_to_bias(upstream[i], bias.type) : Tensor());
    }
    const Added& residual = saved.residual;
    if (residual.is_defined)
      gradients.push_back(residual.wants(upstream[0]) ? upstream[0].to(residual.type) : Tensor());
    gradients.resize(gradients.size() + 4);
    return gradients;
  }

 private:
  // A bias or residual that is added to the product.
  struct Added {
    bool is_defined = false, needs_grad = false;
    at::ScalarType type = at::kFloat;

    bool wants(const Tensor& upstream) const { return needs_grad && upstream.defined(); }
  };

  static Added as_added(const OptionalTensor& t) {
    return t.has_value() ? Added{true, t->requires_grad(), t->scalar_type()} : Added();
  }

  struct SavedLayer {
    Tensor weight;
    bool wants_weight = false;
    Added bias{};
  };

  struct Saved {
    Tensor x;  // rounded to `type`; saved only if a weight needs a gradient
    bool wants_x = false;
    at::ScalarType type = at::kFloat, x_type = at::kFloat;
    int64_t library = 0;
    std::vector<SavedLayer> layers{};
    Added residual{};
    int64_t count = 0;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.x, self.wants_x, self.type, self.x_type, self.library, self.count);
      visit.each(self.residual.is_defined, self.residual.needs_grad, self.residual.type);
      if constexpr (!std::is_const_v<Self>) self.layers.resize(self.count);
      for (auto& layer : self.layers) {
        visit.each(layer.weight, layer.wants_weight, layer.bias.is_defined, layer.bias.needs_grad,
                   layer.bias.type);
      }
    }

    // Returns which products backward needs. A layer whose output the loss does not depend on gives no
    // gradient.
    LinearMask mask(at::TensorList upstream) const {
      LinearMask needed(layers.size());
      for (size_t i = 0; i < layers.size(); ++i) {
        needed.x = needed.x || (wants_x && upstream[i].defined());
        needed.weights[i] = layers[i].wants_weight && upstream[i].defined();
      }
      return needed;
    }

    // Calls the backward operator.
    LinearGradients gradients(at::TensorList upstream, const LinearMask& needed) const {
      OptionalTensors grads;
      for (const Tensor& g : upstream) grads.push_back(as_optional(g));
      variable_list weights;
      for (const SavedLayer& layer : layers) weights.push_back(layer.weight);
      c10::List<bool> mask;
      needed.append_to(mask);
      static auto op = find<LinearGroupBackwardSignature>("shoestring::_linear_group_backward");
      auto results =
          LinearGradients::from(op.call(grads, as_optional(x), weights, type, x_type, library, mask));
      if (!needed.x) results.x = Tensor();
      for (size_t i = 0; i < layers.size(); ++i) {
        if (!needed.weights[i]) results.weights[i] = Tensor();
      }
      return results;
    }
  };

  // Computes the gradients of x and of the weights by operations of PyTorch, which autograd records.
  static LinearGradients differentiable(const Saved& saved, at::TensorList upstream,
                                        const LinearMask& needed) {
    LinearGradients gradients(saved.layers.size());
    for (size_t i = 0; i < saved.layers.size(); ++i) {
      if (!upstream[i].defined()) continue;
      const Tensor& weight = saved.layers[i].weight;
      const Tensor grad = upstream[i].to(saved.type);
      if (needed.x) {
        const Tensor more = at::matmul(grad, weight.to(saved.type)).to(saved.x_type);
        gradients.x = gradients.x.defined() ? gradients.x + more : more;
      }
      if (needed.weights[i]) {
        gradients.weights[i] = at::mm(rows_of(grad).t(), rows_of(saved.x)).to(weight.scalar_type());
      }
    }
    return gradients;
  }
};

variable_list apply_linear(const Tensor& x, at::TensorList weights, const OptionalTensors& biases,
                           const OptionalTensor& residual, OptionalType dtype, int64_t library) {
  variable_list tensors(weights.begin(), weights.end());
  std::vector<bool> biased(weights.size(), false);
  for (size_t i = 0; i < biases.size(); ++i) {
    const OptionalTensor bias = biases.get(i);
    biased[i] = bias.has_value();
    if (bias.has_value()) tensors.push_back(*bias);
  }
  if (residual.has_value()) tensors.push_back(*residual);
  variable_list outputs = Linear::apply(x, at::TensorList(tensors), biased, residual.has_value(),
                                        dtype.value_or(x.scalar_type()), library);
  outputs.resize(weights.size());  // drops the rounded x
  return outputs;
}

bool wants_any_grad(const OptionalTensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const OptionalTensor& t) { return wants_grad(t); });
}

variable_list linear_group_autograd(const Tensor& x, at::TensorList weights, const OptionalTensors& biases,
                                    OptionalType dtype, int64_t library) {
  const bool recorded =
      x.requires_grad() || wants_any_grad(biases) ||
      std::any_of(weights.begin(), weights.end(), [](auto& w) { return w.requires_grad(); });
  if (recorded && at::GradMode::is_enabled())
    return apply_linear(x, weights, biases, std::nullopt, dtype, library);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_linear_group(x, weights, biases, dtype, library);
}

Tensor linear_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& residual, OptionalType dtype, int64_t library) {
  if (needs_grad(x, weight) || (at::GradMode::is_enabled() && (wants_grad(bias) || wants_grad(residual))))
    return apply_linear(x, {weight}, OptionalTensors({bias}), residual, dtype, library)[0];
  at::AutoDispatchBelowADInplaceOrView below;
  return call_linear(x, weight, bias, residual, dtype, library);
}

template <c10::DeviceType device>
variable_list linear_group_autocast(const Tensor& x, at::TensorList weights, const OptionalTensors& biases,
                                    OptionalType dtype, int64_t library) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  return call_linear_group(x, weights, biases, autocast_type<device>(x, dtype), library);
}

template <c10::DeviceType device>
Tensor linear_autocast(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& residual, OptionalType dtype, int64_t library) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  return call_linear(x, weight, bias, residual, autocast_type<device>(x, dtype), library);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl(kLinearOp, linear_autograd);
  m.impl(kLinearGroupOp, linear_group_autograd);
}
const AutocastRules linear_rules([](torch::Library& m, auto device) {
  m.impl(kLinearOp, linear_autocast<device>);
  m.impl(kLinearGroupOp, linear_group_autocast<device>);
});

}  // namespace
}  // namespace shoestring::gemm
