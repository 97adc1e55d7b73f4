#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "core/autograd.h"
#include "core/call.h"
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
  // given: all weights, then all biases that are defined, then the residual if any. biased: for each layer,
  // whether it has a bias.
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList given,
                               std::vector<bool> biased, bool has_residual, at::ScalarType type,
                               int64_t library) {
    at::AutoDispatchBelowADInplaceOrView below;
    const size_t count = biased.size();
    const at::TensorList weights = given.slice(0, count);
    OptionalTensors biases;
    size_t next = count;
    for (const bool has : biased) biases.push_back(has ? OptionalTensor(given[next++]) : std::nullopt);
    const bool by_weight =
        std::any_of(weights.begin(), weights.end(), [](auto& w) { return w.requires_grad(); });
    const Tensor rounded = by_weight && x.scalar_type() != type ? x.to(type) : x;
    variable_list outputs =
        has_residual
            ? variable_list{call_linear(rounded, weights[0], biases.get(0), given.back(), type, library)}
            : call_linear_group(rounded, weights, biases, type, library);

    c10::List<bool> mask({x.requires_grad()}), has_bias;
    for (const bool has : biased) has_bias.push_back(has);
    for (const Tensor& t : given) mask.push_back(t.requires_grad());
    variable_list saved{by_weight ? rounded : Tensor()};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(saved);
    ctx->set_materialize_grads(false);
    ctx->saved_data["mask"] = mask;
    ctx->saved_data["biased"] = has_bias;
    ctx->saved_data["type"] = type;
    ctx->saved_data["x_type"] = x.scalar_type();
    ctx->saved_data["library"] = library;
    std::vector<int64_t> types;
    for (const Tensor& t : given.slice(count)) types.push_back(static_cast<int64_t>(t.scalar_type()));
    ctx->saved_data["types"] = types;
    if (!rounded.is_same(x)) outputs.push_back(rounded);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto mask = ctx->saved_data["mask"].toBoolList(), biased = ctx->saved_data["biased"].toBoolList();
    const auto type = ctx->saved_data["type"].toScalarType(),
               x_type = ctx->saved_data["x_type"].toScalarType();
    const auto types = ctx->saved_data["types"].toIntVector();
    const size_t count = biased.size();
    const at::TensorList weights(saved.data() + 1, count), upstream(grads.data(), count);
    variable_list gradients(1 + count + types.size() + 4);
    // A layer whose output the loss does not depend on gives no gradient.
    const bool reached = std::any_of(upstream.begin(), upstream.end(), [](auto& g) { return g.defined(); });
    c10::List<bool> products({mask.get(0) && reached});
    bool any = products.get(0);
    for (size_t i = 0; i < count; ++i) {
      products.push_back(mask.get(1 + i) && upstream[i].defined());
      any = any || products.get(1 + i);
    }
    if (any && at::GradMode::is_enabled()) {
      differentiable(gradients, upstream, saved[0], weights, products, type, x_type);
    } else if (any) {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<LinearGroupBackwardSignature>("shoestring::_linear_group_backward");
      OptionalTensors given;
      for (const Tensor& g : upstream) given.push_back(as_optional(g));
      const auto made = op.call(given, as_optional(saved[0]), weights, type, x_type,
                                ctx->saved_data["library"].toInt(), products);
      for (size_t i = 0; i <= count; ++i) {
        if (products.get(i)) gradients[i] = made[i];
      }
    }
    // the gradient of the rounded x, which only double backward gives
    if (grads.size() > count && grads[count].defined() && mask.get(0)) {
      const Tensor more = grads[count].to(x_type);
      gradients[0] = gradients[0].defined() ? gradients[0] + more : more;
    }
    size_t next = 0;
    for (size_t i = 0; i < count; ++i) {
      if (!biased.get(i)) continue;
      const size_t place = 1 + count + next;
      if (mask.get(place) && upstream[i].defined()) {
        gradients[place] = sum_to_bias(upstream[i], static_cast<at::ScalarType>(types[next]));
      }
      ++next;
    }
    if (next < types.size() && mask.get(1 + count + next) && upstream[0].defined())
      gradients[1 + count + next] = upstream[0].to(static_cast<at::ScalarType>(types[next]));
    return gradients;
  }

 private:
  // Computes the gradients of x and of the weights by operations of PyTorch, which autograd records.
  static void differentiable(variable_list& gradients, at::TensorList upstream, const Tensor& x,
                             at::TensorList weights, const c10::List<bool>& mask, at::ScalarType type,
                             at::ScalarType x_type) {
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!upstream[i].defined()) continue;
      const Tensor grad = upstream[i].to(type);
      if (mask.get(0)) {
        const Tensor more = at::matmul(grad, weights[i].to(type)).to(x_type);
        gradients[0] = gradients[0].defined() ? gradients[0] + more : more;
      }
      if (mask.get(1 + i)) {
        gradients[1 + i] = at::mm(rows_of(grad).t(), rows_of(x)).to(weights[i].scalar_type());
      }
    }
  }
};

variable_list apply_linear(const Tensor& x, at::TensorList weights, const OptionalTensors& biases,
                           const OptionalTensor& residual, OptionalType dtype, int64_t library) {
  variable_list given(weights.begin(), weights.end());
  std::vector<bool> biased(weights.size(), false);
  for (size_t i = 0; i < biases.size(); ++i) {
    const OptionalTensor bias = biases.get(i);
    biased[i] = bias.has_value();
    if (bias.has_value()) given.push_back(*bias);
  }
  if (residual.has_value()) given.push_back(*residual);
  variable_list outputs = Linear::apply(x, at::TensorList(given), biased, residual.has_value(),
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
TORCH_LIBRARY_IMPL(shoestring, AutocastCPU, m) {
  m.impl(kLinearOp, linear_autocast<at::kCPU>);
  m.impl(kLinearGroupOp, linear_group_autocast<at::kCPU>);
}
TORCH_LIBRARY_IMPL(shoestring, AutocastCUDA, m) {
  m.impl(kLinearOp, linear_autocast<at::kCUDA>);
  m.impl(kLinearGroupOp, linear_group_autocast<at::kCUDA>);
}

}  // namespace
}  // namespace shoestring::gemm
