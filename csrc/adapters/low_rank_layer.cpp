// Implements what embeddings and convolutions with adapters share.
#include <utility>

#include <ATen/Functions.h>

#include <shoestring/adapters/adapter.h>

#include "adapters/low_rank.h"

namespace shoestring::nn {

using at::Tensor;

at::TensorOptions LowRankLayer::adapter_type() const {
  return weight.options()
      .dtype(weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
      .requires_grad(false);
}

void LowRankLayer::freeze() {
  weight.requires_grad_(false);
  if (bias.defined()) bias.requires_grad_(false);
  // unmerge cannot undo a merge once an adapter was added
  former_.reset();
}

Tensor LowRankLayer::gain(const std::string& adapter_name) const {
  const AdapterImpl& adapter = *adapters[adapter_name];
  const auto [lora_A, lora_B] = factors(adapter);
  LoraWeight layer(matrix(weight.detach()));
  layer.lora_A(lora_A).lora_B(lora_B).scaling(adapter.lora()->scaling());
  return adapter["lora_magnitude_vector"].flatten() / lora_weight_norm(layer);
}

Tensor LowRankLayer::composed(const Tensor& base, const Tensor& x, int64_t features,
                              c10::function_ref<Tensor(const AdapterImpl&)> product) const {
  std::vector<int64_t> vector(static_cast<size_t>(base.dim()), 1), per_row = vector;
  vector[static_cast<size_t>(features)] = -1;
  per_row.front() = -1;
  Tensor total = base;
  for (const auto& name : current()) {
    const AdapterImpl& adapter = *adapters[name];
    const double scaling = adapter.lora()->scaling();
    Tensor change = scaling * product(adapter);
    if (adapter.lora()->dora()) {
      const Tensor multiplied = gain(name).view(vector);
      change = (multiplied - 1) * base + multiplied * change;
    }
    if (adapter.lora()->lora_bias()) change = change + scaling * adapter["lora_bias"].view(vector);
    if (const Tensor chosen = uses(name, x); chosen.defined()) change = change * chosen.reshape(per_row);
    total = total + change;
  }
  return total.to(base.scalar_type());
}

std::array<double, 2> LowRankLayer::merge(const MergeOptions& options) {
  TORCH_CHECK(has_adapter(), dynamic_cast<torch::nn::Module&>(*this).name(),
              ": merge: expected a layer with an adapter, received one without");
  const torch::NoGradGuard no_grad;
  const Tensor dense = matrix(weight.detach()).to(adapter_type());
  const auto part = [&](const AdapterImpl& from) {
    const auto [lora_A, lora_B] = factors(from);
    return Part{lora_A, lora_B, from.lora()->scaling(), Tensor()};
  };
  Tensor sum = dense.clone(), summed_bias;
  if (bias.defined()) summed_bias = bias.detach().to(adapter_type());
  for (const auto& name : options.adapter_names().empty() ? active : options.adapter_names()) {
    if (!has_adapter(name)) continue;
    const AdapterImpl& adapter = *adapters[name];
    if (adapter.lora()->dora()) {
      sum += low_rank_sum(dense, {part(adapter)}) * gain(name).unsqueeze(1) - dense;
    } else {
      sum = low_rank_sum(sum, {part(adapter)});
    }
    if (adapter.lora()->lora_bias())
      summed_bias = add_defined(summed_bias, adapter.lora()->scaling() * adapter["lora_bias"]);
  }
  const Tensor exact = folded(sum);
  const Tensor value = exact.contiguous().to(weight.scalar_type());
  const auto error = merge_error(weight, exact, value);
  const Former former{weight, bias, adapters, active};
  unregister_adapters();
  replace(value, summed_bias.defined() ? summed_bias.to(weight.scalar_type()) : summed_bias);
  former_.reset();
  if (options.reversible()) former_ = former;
  return error;
}

void LowRankLayer::unmerge() {
  TORCH_CHECK(former_.has_value(), dynamic_cast<torch::nn::Module&>(*this).name(),
              ": unmerge: expected a layer that was merged with reversible=true, received one without a "
              "saved weight");
  const Former former = *std::exchange(former_, std::nullopt);
  const auto device = weight.device();
  const torch::NoGradGuard no_grad;
  // The same weight, if it is on the device, since another layer may be tied to it.
  replace(former.weight.to(device), former.bias.defined() ? former.bias.detach().to(device) : former.bias);
  adapters = former.adapters;
  active = former.active;
  register_adapters();
  for (auto& item : adapters) item.value()->to(device);
}

}  // namespace shoestring::nn
