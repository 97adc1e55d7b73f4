// What a linear layer computes with its adapters.
#include <algorithm>
#include <limits>

#include <ATen/Functions.h>

#include <shoestring/nn/linear.h>

#include "lora/initialize.h"
#include "nn/low_rank.h"

namespace shoestring::nn {

using at::Tensor;
using Names = std::vector<std::string>;

namespace {

bool is_dora(const Adapter& adapter) { return adapter->lora() != nullptr && adapter->lora()->dora(); }
bool has_lora_bias(const Adapter& adapter) { return adapter->lora() != nullptr && adapter->lora()->lora_bias(); }

LoraInput input_with(double dropout, const Tensor& x) {
  LoraInput input;
  if (dropout == 0) return input;
  const auto number = at::TensorOptions(at::kLong).device(x.device());
  return input.dropout(dropout).seed(at::randint(std::numeric_limits<int64_t>::max(), {1}, number));
}

// A vector over outputs, or one for each row of the batch, to broadcast with x's outputs.
Tensor over_rows(const Tensor& t, const Tensor& x) {
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape.front() = x.size(0);
  shape.back() = -1;
  return t.view(shape);
}

}  // namespace

AdaptedLayer::Shapes LinearImpl::shapes(const AnyAdapterOptions& adapter_options, const std::string& caller,
                                        const std::string& name) const {
  const auto& own = std::get<AdapterOptions>(adapter_options);
  const int64_t in = options.in_features(), out = options.out_features();
  TORCH_CHECK_VALUE(!own.changes_base() || own.rank() <= std::min(in, out), caller, ": rank: expected at most ", std::min(in, out),
                    " for '", own.init(), "', the smaller side of ", name, "; received ", own.rank());
  for (const auto& item : adapters) {
    const auto* other = item.value()->lora();
    TORCH_CHECK_VALUE(other == nullptr || !((own.dora() && other->changes_base()) || (own.changes_base() && other->dora())), caller,
                      ": dora: expected layers whose base no adapter changes, received ", name,
                      " for both DoRA and 'pissa', 'olora' or 'loftq'");
  }
  Shapes found;
  found.insert("lora_A", {own.rank(), in});
  found.insert("lora_B", {out, own.rank()});
  if (own.lora_bias()) found.insert("lora_bias", {out});
  if (own.dora()) found.insert("lora_magnitude_vector", {out});
  return found;
}

AdapterImpl::Tensors LinearImpl::start(const AnyAdapterOptions& adapter_options) const {
  const auto& own = std::get<AdapterOptions>(adapter_options);
  auto values = draw(options.in_features(), options.out_features(), own,
                     is_quantized() ? std::nullopt : std::optional(weight.scalar_type()));
  if (own.dora()) {
    LoraWeight layer = plain();
    layer.lora_A(values["lora_A"].to(adapter_type())).lora_B(values["lora_B"].to(adapter_type()));
    values.insert("lora_magnitude_vector", lora_weight_norm(layer));
  }
  return values;
}

AdapterImpl::Tensors LinearImpl::take_out(const AdapterOptions& adapter_options) {
  return lora::take_out(*this, adapter_options, nullptr, false);
}

double LinearImpl::dropout() const {
  std::optional<double> found;
  for (const auto& name : is_training() ? current() : Names()) {
    const auto* own = adapters[name]->lora();
    if (own == nullptr) continue;
    TORCH_CHECK_VALUE(found.value_or(own->dropout()) == own->dropout(), "nn::Linear: dropout: expected the same of all active "
                      "adapters in training, received ", *found, " and ", own->dropout());
    found = own->dropout();
  }
  return found.value_or(0);
}

bool LinearImpl::is_one() const {
  if (rows.has_value() && enabled) return false;
  const Names names = current();
  const auto gained = std::count_if(names.begin(), names.end(), [&](const auto& name) { return is_dora(adapters[name]); });
  return gained == 0 || names.size() == 1;
}

bool LinearImpl::is_lora_weight() const { return (is_quantized() || !weight.requires_grad()) && is_one(); }

std::optional<LoraWeight> LinearImpl::lora_weight() const {
  return is_lora_weight() ? std::optional(joined()) : std::nullopt;
}

LoraWeight LinearImpl::plain() const {
  LoraWeight layer(is_quantized() ? base->packed : weight);
  if (is_quantized()) layer.absmax(base->absmax).nested(optional(base->nested)).quantize(base->options.quantize());
  return layer;
}

LoraWeight LinearImpl::joined() const {
  const Names names = current();
  LoraWeight layer = plain();
  concatenate(parts(names), layer);
  for (const auto& name : names) {
    if (is_dora(adapters[name])) layer.gain(gain(name));
  }
  return layer.bias(optional(add_defined(bias, summed_bias(names))));
}

// What is added to the base weight: the named adapters, and what the others took out of it.
std::vector<Part> LinearImpl::parts(const Names& names, const Tensor& x) const {
  std::vector<Part> found;
  for (const auto& name : names) {
    found.push_back(part_of(*adapters[name]));
    if (x.defined()) found.back().uses = uses(name, x);
  }
  for (const auto& item : adapters) {
    if (!item.value()->has("initial_A")) continue;
    const bool used = std::find(names.begin(), names.end(), item.key()) != names.end();
    const Tensor rows_with = used && x.defined() ? uses(item.key(), x) : Tensor();
    if (used && !rows_with.defined()) continue;
    found.push_back(taken_part(*item.value()));
    if (rows_with.defined()) found.back().uses = 1 - rows_with;
  }
  return found;
}

// DoRA's magnitude over the norm of the adapted weight's rows, which is no part of the gradient.
Tensor LinearImpl::gain(const std::string& adapter_name) const {
  const AdapterImpl& adapter = *adapters[adapter_name];
  LoraWeight layer = plain();
  concatenate({part_of(adapter)}, layer);
  return adapter["lora_magnitude_vector"] / lora_weight_norm(layer);
}

Tensor LinearImpl::summed_bias(const Names& names) const {
  Tensor sum;
  for (const auto& name : names) {
    const Adapter& adapter = adapters[name];
    if (has_lora_bias(adapter)) sum = add_defined(sum, adapter->lora()->scaling() * (*adapter)["lora_bias"]);
  }
  return sum;
}

Tensor LinearImpl::forward(const Tensor& x) {
  if (has_adapter()) {
    if (is_one()) return lora_linear(x, joined(), input_with(dropout(), x));
    return rows.has_value() && enabled ? forward_rows(x) : forward_gains(x);
  }
  if (!is_quantized()) return at::linear(x, weight, bias);
  return quantized_linear(x, base->packed, base->absmax, options.out_features(), optional(bias), optional(base->nested),
                          base->options.quantize());
}

// A different adapter for each row of the batch.
Tensor LinearImpl::forward_rows(const Tensor& x) const {
  const Names names = current();
  const auto all = parts(names, x);
  LoraWeight layer = plain();
  concatenate(all, layer);
  if (!all.empty()) layer.low_scale(row_scale(all, x));
  Tensor y = lora_linear(x, layer, input_with(dropout(), x));
  Tensor change;
  for (const auto& name : names) {
    if (is_dora(adapters[name])) change = add_defined(change, uses(name, x) * (gain(name) - 1));
  }
  if (change.defined()) y = y * over_rows(1 + change, x).to(y.scalar_type());
  if (bias.defined()) y = y + bias.to(y.scalar_type());
  for (const auto& name : names) {
    const Tensor own = summed_bias({name});
    if (own.defined()) y = y + over_rows(uses(name, x) * own, x).to(y.scalar_type());
  }
  return y;
}

// Several adapters, of which some are DoRA's: each one's own gain on its own product; on the base's, all that they change.
Tensor LinearImpl::forward_gains(const Tensor& x) const {
  const Names names = current();
  auto all = parts(names);
  Tensor change;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!is_dora(adapters[names[i]])) continue;
    const Tensor own = gain(names[i]);
    all[i].lora_B = all[i].lora_B * own.unsqueeze(1);
    change = add_defined(change, own - 1);
  }
  const Tensor y = lora_linear(x, plain().gain(1 + change).bias(optional(add_defined(bias, summed_bias(names)))));
  LoraWeight low(plain());
  concatenate(all, low);
  const LoraInput input = input_with(dropout(), x);
  const Tensor read = input.seed().has_value() ? seeded_dropout(x, *input.seed(), input.dropout()) : x;
  const Tensor product = at::linear(at::linear(read.to(low.lora_A()->scalar_type()), *low.lora_A()), *low.lora_B());
  return y + (low.scaling() * product).to(y.scalar_type());
}

AdapterImpl::Tensors LinearImpl::merged(const Names& names) const {
  const Tensor dense = dense_weight();
  Names plain_ones, gained;
  for (const auto& name : names) (is_dora(adapters[name]) ? gained : plain_ones).push_back(name);
  Tensor sum = low_rank_sum(dense, parts(plain_ones));
  for (const auto& name : gained) {
    const Tensor own = low_rank_sum(dense, {part_of(*adapters[name])});
    sum += own * gain(name).to(dense.scalar_type()).unsqueeze(1) - dense;
  }
  AdapterImpl::Tensors result;
  result.insert("weight", sum);
  const Tensor all = add_defined(bias, summed_bias(names));
  if (all.defined()) result.insert("bias", all.detach().to(dense.scalar_type()));
  return result;
}

std::vector<Tensor> forward_together(const Tensor& x, const std::vector<Linear>& layers) {
  std::optional<double> dropout;
  bool together = true;
  for (const Linear& layer : layers) {  // before anything is computed
    together = together && layer->is_lora_weight() && (!layer->has_adapter() || dropout.value_or(layer->dropout()) == layer->dropout());
    if (layer->has_adapter() && together) dropout = layer->dropout();
  }
  std::vector<LoraWeight> weights;
  std::vector<Tensor> outputs;
  for (Linear layer : layers) {
    if (together) {
      weights.push_back(*layer->lora_weight());
    } else {
      outputs.push_back(layer(x));
    }
  }
  return together ? lora_linear_group(x, weights, input_with(dropout.value_or(0), x)) : outputs;
}

Tensor swiglu_mlp(const Tensor& x, const Linear& gate, const Linear& up, const Linear& down) {
  const auto outputs = forward_together(x, {gate, up});
  const auto weight = down->lora_weight();
  if (!weight.has_value()) return Linear(down)(swiglu(outputs[0], outputs[1]));
  return lora_linear(outputs[1], *weight, input_with(down->dropout(), x).gate(outputs[0]));
}

}  // namespace shoestring::nn
