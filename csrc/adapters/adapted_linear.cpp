// Implements forward and the merging of adapters for shoestring::nn::AdaptableLinear.
#include <algorithm>

#include <ATen/Functions.h>

#include <shoestring/adapters/adaptable_linear.h>
#include <shoestring/gemm/ops.h>
#include <shoestring/layers/ops.h>

#include "adapters/initialize.h"
#include "adapters/low_rank.h"

namespace shoestring::nn {

using at::Tensor;
using Names = std::vector<std::string>;

namespace {

bool is_dora(const Adapter& adapter) { return adapter->lora() != nullptr && adapter->lora()->dora(); }
bool has_lora_bias(const Adapter& adapter) {
  return adapter->lora() != nullptr && adapter->lora()->lora_bias();
}

bool multiplies_input(const Adapter& adapter) {
  const auto* ia3 = std::get_if<IA3Options>(&adapter->options);
  return ia3 != nullptr && ia3->feedforward();
}

// Views t (rows of the batch, out_features) as (rows, 1, ..., 1, out_features). The view has as many
// dimensions as x, so that it broadcasts with the layer's output for x.
Tensor over_rows(const Tensor& t, const Tensor& x) {
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape.front() = x.size(0);
  shape.back() = -1;
  return t.view(shape);
}

}  // namespace

AdaptableLayer::Shapes AdaptableLinearImpl::shapes(const AnyAdapterOptions& adapter_options,
                                                   const std::string& caller, const std::string& name) const {
  check_kind(adapter_options, caller, name);
  TORCH_CHECK_VALUE(!is_fake_quantized(), caller, ": expected layers without fake quantisation, received ",
                    name, "; call convert_quantized first");
  const int64_t in = options.in_features(), out = options.out_features();
  Shapes shapes;
  if (const auto* ia3 = std::get_if<IA3Options>(&adapter_options)) {
    shapes.insert("ia3_l", ia3->feedforward() ? std::vector<int64_t>{1, in} : std::vector<int64_t>{out, 1});
    return shapes;
  }
  if (const auto* vera = std::get_if<VeraOptions>(&adapter_options)) {
    shapes.insert("vera_lambda_b", {out});
    shapes.insert("vera_lambda_d", {vera->rank()});
    return shapes;
  }
  const auto& low_rank = std::get<LoraOptions>(adapter_options);
  TORCH_CHECK_VALUE(!low_rank.changes_base() || low_rank.rank() <= std::min(in, out), caller,
                    ": rank: expected at most ", std::min(in, out), " for '", low_rank.init(),
                    "', the smaller side of ", name, "; received ", low_rank.rank());
  for (const auto& item : adapters) {
    const auto* other_lora = item.value()->lora();
    TORCH_CHECK_VALUE(other_lora == nullptr || !((low_rank.dora() && other_lora->changes_base()) ||
                                                 (low_rank.changes_base() && other_lora->dora())),
                      caller, ": dora: expected layers whose base no adapter changes, received ", name,
                      " for both DoRA and 'pissa', 'olora' or 'loftq'");
  }
  shapes.insert("lora_A", {low_rank.rank(), in});
  shapes.insert("lora_B", {out, low_rank.rank()});
  if (low_rank.lora_bias()) shapes.insert("lora_bias", {out});
  if (low_rank.dora()) shapes.insert("lora_magnitude_vector", {out});
  return shapes;
}

AdapterImpl::Tensors AdaptableLinearImpl::start(const AnyAdapterOptions& adapter_options) const {
  if (!std::holds_alternative<LoraOptions>(adapter_options)) {
    AdapterImpl::Tensors first;
    for (const auto& item : shapes(adapter_options, "add_adapter", "this layer")) {
      const bool scale = item.key() == "vera_lambda_d";
      const double value = scale ? std::get<VeraOptions>(adapter_options).d_initial() : item.key() == "ia3_l";
      first.insert(item.key(), at::full(item.value(), value));
    }
    return first;
  }
  const auto& lora = std::get<LoraOptions>(adapter_options);
  auto values = draw({lora.rank(), options.in_features()}, {options.out_features(), lora.rank()}, lora,
                     is_quantized() ? std::nullopt : std::optional(weight.scalar_type()));
  if (lora.dora()) {
    LoraWeight layer = plain();
    layer.lora_A(values["lora_A"].to(adapter_type())).lora_B(values["lora_B"].to(adapter_type()));
    values.insert("lora_magnitude_vector", lora_weight_norm(layer));
  }
  return values;
}

AdapterImpl::Tensors AdaptableLinearImpl::prepare(const AnyAdapterOptions& adapter_options) {
  const auto* lora_options = std::get_if<LoraOptions>(&adapter_options);
  if (lora_options != nullptr && lora_options->changes_base())
    return lora::take_out(*this, *lora_options, nullptr, false);
  const auto* vera = std::get_if<VeraOptions>(&adapter_options);
  return vera == nullptr ? AdapterImpl::Tensors()
                         : lora::projection(*vera, options.in_features(), options.out_features());
}

bool AdaptableLinearImpl::has_several_gains() const {
  const Names names = current();
  return names.size() > 1 &&
         std::any_of(names.begin(), names.end(), [&](const auto& name) { return is_dora(adapters[name]); });
}

bool AdaptableLinearImpl::is_one() const {
  const Names names = current();
  return !observer && !(rows.has_value() && enabled) && !has_several_gains() &&
         std::none_of(names.begin(), names.end(),
                      [&](const auto& name) { return multiplies_input(adapters[name]); });
}

bool AdaptableLinearImpl::is_lora_weight() const {
  return (is_quantized() || (!weight.requires_grad() && !is_fake_quantized())) && is_one();
}

std::optional<LoraWeight> AdaptableLinearImpl::lora_weight() const {
  return is_lora_weight() ? std::optional(joined()) : std::nullopt;
}

LoraWeight AdaptableLinearImpl::plain() const {
  LoraWeight layer(is_quantized() ? base->packed : weight);
  if (is_quantized())
    layer.absmax(base->absmax).nested(optional(base->nested)).quantize(base->options.quantize());
  return layer;
}

LoraWeight AdaptableLinearImpl::joined() const {
  const Names names = current();
  LoraWeight layer = plain();
  concatenate(parts(names), layer);
  for (const auto& name : names) {
    if (is_dora(adapters[name])) layer.gain(gain(name));
  }
  Tensor sum = add_defined(bias, summed_bias(names));
  if (const Tensor after = vectors(names)[1]; after.defined()) {
    layer.gain(after);
    if (sum.defined()) sum = sum * after;
  }
  return layer.bias(optional(sum));
}

// Returns the two vectors by which the IA3 adapters in `names` multiply the layer's input and its output. A
// vector is undefined if no such adapter exists.
std::array<Tensor, 2> AdaptableLinearImpl::vectors(const Names& names) const {
  std::array<Tensor, 2> sides;
  for (const auto& name : names) {
    if (!std::holds_alternative<IA3Options>(adapters[name]->options)) continue;
    Tensor& side = sides[multiplies_input(adapters[name]) ? 0 : 1];
    const Tensor scale = (*adapters[name])["ia3_l"].flatten();
    side = side.defined() ? side * scale : scale;
  }
  return sides;
}

Part AdaptableLinearImpl::part(const std::string& adapter_name) const {
  const AdapterImpl& adapter = *adapters[adapter_name];
  if (adapter.lora() != nullptr)
    return {adapter["lora_A"], adapter["lora_B"], adapter.lora()->scaling(), Tensor()};
  const Tensor vera_A = adapter["vera_A"].narrow(1, 0, options.in_features()),
               vera_B = adapter["vera_B"].narrow(0, 0, options.out_features());
  return {adapter["vera_lambda_d"].unsqueeze(1) * vera_A, adapter["vera_lambda_b"].unsqueeze(1) * vera_B, 1,
          Tensor()};
}

// Returns the low-rank products to add to the stored base weight. They include the product of each adapter in
// `names`. Every other adapter adds its initial product if its initialisation subtracted that product from
// the base weight.
std::vector<Part> AdaptableLinearImpl::parts(const Names& names, const Tensor& x) const {
  std::vector<Part> result;
  for (const auto& name : names) {
    if (std::holds_alternative<IA3Options>(adapters[name]->options)) continue;
    result.push_back(part(name));
    if (x.defined()) result.back().uses = uses(name, x);
  }
  for (const auto& item : adapters) {
    if (!item.value()->has("initial_A")) continue;
    const bool used = std::find(names.begin(), names.end(), item.key()) != names.end();
    const Tensor rows_with = used && x.defined() ? uses(item.key(), x) : Tensor();
    if (used && !rows_with.defined()) continue;
    result.push_back(taken_part(*item.value()));
    if (rows_with.defined()) result.back().uses = 1 - rows_with;
  }
  return result;
}

// Returns DoRA's gain of each output feature: the adapter's magnitude divided by the norm of the feature's
// row of the adapted weight. Backward treats the norm as a constant.
Tensor AdaptableLinearImpl::gain(const std::string& adapter_name) const {
  LoraWeight layer = plain();
  concatenate({part(adapter_name)}, layer);
  return (*adapters[adapter_name])["lora_magnitude_vector"] / lora_weight_norm(layer);
}

Tensor AdaptableLinearImpl::summed_bias(const Names& names) const {
  Tensor sum;
  for (const auto& name : names) {
    const Adapter& adapter = adapters[name];
    if (has_lora_bias(adapter)) sum = add_defined(sum, adapter->lora()->scaling() * (*adapter)["lora_bias"]);
  }
  return sum;
}

Tensor AdaptableLinearImpl::forward(const Tensor& x) {
  if (observer) observer(x);
  if (has_adapter()) {
    if (rows.has_value() && enabled) return forward_rows(x);
    if (has_several_gains()) return forward_gains(x);
    const Tensor before = vectors(current())[0];
    return lora_linear(before.defined() ? (x * before).to(x.scalar_type()) : x, joined(),
                       input_with(dropout(), x));
  }
  if (!is_quantized()) return dense_linear(x, computed_weight(), optional(bias));
  return quantized_linear(x, base->packed, base->absmax, options.out_features(), optional(bias),
                          optional(base->nested), base->options.quantize());
}

// Computes the layer's output for a batch whose rows use different adapters.
Tensor AdaptableLinearImpl::forward_rows(const Tensor& x) const {
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
    const Tensor bias_of_adapter = summed_bias({name});
    if (bias_of_adapter.defined()) y = y + over_rows(uses(name, x) * bias_of_adapter, x).to(y.scalar_type());
  }
  return y;
}

// Computes the layer's output with several active adapters, of which at least one is DoRA. W is the base
// weight, P_i is the low-rank product of adapter i, and g_i is its DoRA gain, or 1 without DoRA:
//   y = (1 + sum (g_i - 1)) W x + sum g_i P_i x + biases.
Tensor AdaptableLinearImpl::forward_gains(const Tensor& x) const {
  const Names names = current();
  auto all = parts(names);
  Tensor change;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!is_dora(adapters[names[i]])) continue;
    const Tensor gain_of_adapter = gain(names[i]);
    all[i].lora_B = all[i].lora_B * gain_of_adapter.unsqueeze(1);
    change = add_defined(change, gain_of_adapter - 1);
  }
  const Tensor y =
      lora_linear(x, plain().gain(1 + change).bias(optional(add_defined(bias, summed_bias(names)))));
  LoraWeight low(plain());
  concatenate(all, low);
  const LoraInput input = input_with(dropout(), x);
  const Tensor read = input.seed().has_value() ? seeded_dropout(x, *input.seed(), input.dropout()) : x;
  const Tensor product =
      at::linear(at::linear(read.to(low.lora_A()->scalar_type()), *low.lora_A()), *low.lora_B());
  return y + (low.scaling() * product).to(y.scalar_type());
}

AdapterImpl::Tensors AdaptableLinearImpl::merged(const Names& names) const {
  const Tensor dense = dense_weight();
  Names plain_ones, gained;
  for (const auto& name : names) (is_dora(adapters[name]) ? gained : plain_ones).push_back(name);
  Tensor sum = low_rank_sum(dense, parts(plain_ones));
  for (const auto& name : gained) {
    const Tensor with_adapter = low_rank_sum(dense, {part(name)});
    sum += with_adapter * gain(name).to(dense.scalar_type()).unsqueeze(1) - dense;
  }
  Tensor all = add_defined(bias, summed_bias(names));
  const auto [before, after] = vectors(names);
  if (before.defined()) sum *= before;
  if (after.defined()) {
    sum *= after.unsqueeze(1);
    if (all.defined()) all = all * after;
  }
  AdapterImpl::Tensors result;
  result.insert("weight", sum);
  if (all.defined()) result.insert("bias", all.detach().to(dense.scalar_type()));
  return result;
}

}  // namespace shoestring::nn
