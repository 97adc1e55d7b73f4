#include <cmath>
#include <limits>
#include <utility>

#include <torch/nn/init.h>

#include <shoestring/model_files.h>
#include <shoestring/nn.h>

#include "lora/names.h"

namespace shoestring::nn {

using at::Tensor;

namespace {

std::optional<Tensor> optional(const Tensor& t) { return t.defined() ? std::optional<Tensor>(t) : std::nullopt; }

// A layer in this form whose weight is still to come: given a 1 x 1 form first, no random one of the full size is drawn.
QuantizedLinear without_weight(const LinearOptions& options, const QuantizeOptions& quantize, bool nested) {
  auto small = QuantizeOptions().quant_type(quantize.quant_type());
  QuantizedLinear layer(QuantizedLinearOptions(1, 1).bias(false).quantize(small).nested(nested));
  layer->options =
      QuantizedLinearOptions(options.in_features(), options.out_features()).bias(false).quantize(quantize).nested(nested);
  return layer;
}

}  // namespace

LinearImpl::LinearImpl(const LinearOptions& options) : options(options) { reset(); }

// Also what clone() calls on a copy: the layer comes out in the form that it has, for the values to be copied into.
void LinearImpl::reset() {
  const bool quantized = is_quantized();
  const auto form = quantized ? base->options : QuantizedLinearOptions(1, 1);
  const auto dtype = quantized ? base->dtype : weight.defined() ? weight.scalar_type() : at::kFloat;
  const auto adapter_options = std::exchange(adapter, std::nullopt);
  base = nullptr;
  former_.reset();
  const std::vector<int64_t> shape{options.out_features(), options.in_features()};
  if (options.placeholder()) {
    weight = register_parameter("weight", placeholder(shape, dtype));
    if (options.bias()) bias = register_parameter("bias", placeholder({options.out_features()}, dtype));
  } else {
    weight = register_parameter("weight", torch::empty(shape, dtype));
    torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));
    if (options.bias()) {
      const double bound = 1 / std::sqrt(static_cast<double>(options.in_features()));
      bias = register_parameter("bias", torch::empty({options.out_features()}, dtype).uniform_(-bound, bound));
    }
  }
  if (quantized) quantize(form.quantize(), form.nested());
  if (adapter_options.has_value()) add_adapter(*adapter_options);
}

void LinearImpl::quantize(const QuantizeOptions& quantize_options, bool nested) {
  TORCH_CHECK(!is_quantized() && !has_adapter(),
              "nn::Linear: quantize: expected a dense layer without an adapter, received one that is ",
              is_quantized() ? "quantised already" : "adapted already");
  QuantizedLinear quantized = without_weight(options, quantize_options, nested);
  quantized->set_weight(weight.detach());
  set_base(quantized);
}

void LinearImpl::set_quantized(const Tensor& bytes, const Tensor& scales, const Tensor& second,
                               const QuantizeOptions& quantize_options, at::ScalarType dtype) {
  TORCH_CHECK(!has_adapter(), "nn::Linear: set_quantized: expected a layer without an adapter, received one that is adapted");
  QuantizedLinear quantized = without_weight(options, quantize_options, second.defined());
  quantized->set_parts(bytes, scales, second, quantize_options);
  quantized->dtype = dtype;
  set_base(quantized);
}

void LinearImpl::set_base(const QuantizedLinear& quantized) {
  if (is_quantized()) {
    unregister_module("base");
  } else {
    parameters_.erase("weight");
    weight = Tensor();
  }
  former_.reset();
  base = register_module("base", quantized);
}

void LinearImpl::set_adapter(const AdapterOptions& adapter_options, const Tensor& A, const Tensor& B,
                             const Tensor& magnitude) {
  if (weight.defined()) weight.requires_grad_(false);
  if (bias.defined()) bias.requires_grad_(false);
  former_.reset();  // there is no way back past a new adapter
  adapter = adapter_options;
  lora_A = register_parameter("lora_A", A);
  lora_B = register_parameter("lora_B", B);
  if (!adapter->dora()) return;
  const Tensor norm = magnitude.defined() ? magnitude : lora_weight_norm(*lora_weight());
  lora_magnitude_vector = register_parameter("lora_magnitude_vector", norm);
}

void LinearImpl::drop_adapter() {
  for (const char* name : {"lora_A", "lora_B", "lora_magnitude_vector"}) {
    if (parameters_.contains(name)) parameters_.erase(name);
  }
  lora_A = lora_B = lora_magnitude_vector = Tensor();
  adapter.reset();
}

void LinearImpl::add_adapter(const AdapterOptions& adapter_options) {
  TORCH_CHECK(!has_adapter(), "nn::Linear: add_adapter: expected a layer without an adapter; merge the one it has first");
  lora::check_adapter("nn::Linear: add_adapter", adapter_options);
  const auto type = adapter_type();
  // Drawn in the order of PEFT and of shoestring.lora, so that a seed gives the same start in both languages.
  Tensor A = torch::empty({adapter_options.rank(), options.in_features()});
  torch::nn::init::kaiming_uniform_(A, std::sqrt(5));
  torch::nn::init::kaiming_uniform_(torch::empty({options.out_features(), adapter_options.rank()}), std::sqrt(5));
  torch::nn::init::kaiming_uniform_(A, std::sqrt(5));
  if (!is_quantized()) A = A.to(weight.scalar_type());
  set_adapter(adapter_options, A.to(type), torch::zeros({options.out_features(), adapter_options.rank()}, type), Tensor());
}

void LinearImpl::load_adapter(const AdapterOptions& adapter_options, const Tensor& A, const Tensor& B,
                              const Tensor& magnitude) {
  TORCH_CHECK(magnitude.defined() == adapter_options.dora(), "nn::Linear: load_adapter: magnitude: expected one with dora, "
              "and none without it, received ", magnitude.defined() ? "one" : "none");
  const auto type = adapter_type();
  const auto own = [&](const Tensor& t) { return t.defined() ? t.detach().to(type).clone() : t; };
  drop_adapter();
  set_adapter(adapter_options, own(A), own(B), own(magnitude));
}

at::TensorOptions LinearImpl::adapter_type() const {
  if (is_quantized()) return base->packed.options().dtype(at::kFloat);
  return weight.options().dtype(weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).requires_grad(false);
}

double LinearImpl::scaling() const {
  const double rank = static_cast<double>(adapter->rank());
  return adapter->alpha() / (adapter->rslora() ? std::sqrt(rank) : rank);
}

std::optional<LoraWeight> LinearImpl::lora_weight() const {
  if (!is_quantized() && weight.requires_grad()) return std::nullopt;
  LoraWeight layer(is_quantized() ? base->packed : weight);
  layer.bias(optional(bias));
  if (is_quantized()) layer.absmax(base->absmax).nested(optional(base->nested)).quantize(base->options.quantize());
  if (!has_adapter()) return layer;
  layer.lora_A(lora_A).lora_B(lora_B).scaling(scaling());
  if (adapter->dora() && lora_magnitude_vector.defined()) layer.gain(lora_magnitude_vector / lora_weight_norm(layer));
  return layer;
}

namespace {

LoraInput input_with(double dropout, const Tensor& x) {
  LoraInput input;
  if (dropout == 0) return input;
  const auto number = at::TensorOptions(at::kLong).device(x.device());
  return input.dropout(dropout).seed(at::randint(std::numeric_limits<int64_t>::max(), {1}, number));
}

}  // namespace

Tensor LinearImpl::forward(const Tensor& x) {
  if (has_adapter()) return lora_linear(x, *lora_weight(), input_with(dropout(), x));
  if (!is_quantized()) return at::linear(x, weight, bias);
  return quantized_linear(x, base->packed, base->absmax, options.out_features(), optional(bias), optional(base->nested),
                          base->options.quantize());
}

std::vector<Tensor> forward_together(const Tensor& x, const std::vector<Linear>& layers) {
  std::vector<LoraWeight> weights;
  std::optional<double> dropout;
  bool together = true;
  for (const Linear& layer : layers) {
    const auto weight = layer->lora_weight();
    together = together && weight.has_value() && (!layer->has_adapter() || dropout.value_or(layer->dropout()) == layer->dropout());
    if (!together) break;
    weights.push_back(*weight);
    if (layer->has_adapter()) dropout = layer->dropout();
  }
  if (together) return lora_linear_group(x, weights, input_with(dropout.value_or(0), x));
  std::vector<Tensor> outputs;
  for (Linear layer : layers) outputs.push_back(layer(x));
  return outputs;
}

Tensor swiglu_mlp(const Tensor& x, const Linear& gate, const Linear& up, const Linear& down) {
  const auto outputs = forward_together(x, {gate, up});
  const auto weight = down->lora_weight();
  if (!weight.has_value()) return Linear(down)(swiglu(outputs[0], outputs[1]));
  return lora_linear(outputs[1], *weight, input_with(down->dropout(), x).gate(outputs[0]));
}

void LinearImpl::merge(bool reversible) {
  TORCH_CHECK(has_adapter(), "nn::Linear: merge: expected a layer with an adapter, received one without");
  torch::NoGradGuard no_grad;
  const auto dtype = is_quantized() ? base->dtype : weight.scalar_type();
  const auto exact = dtype == at::kDouble ? at::kDouble : at::kFloat;
  Tensor dense = is_quantized() ? base->dequantize(at::kFloat) : weight.to(exact);
  Tensor merged = at::addmm(dense, lora_B.to(exact), lora_A.to(exact), 1, scaling());
  if (adapter->dora()) merged.mul_((lora_magnitude_vector / lora_weight_norm(*lora_weight())).to(exact).unsqueeze(1));
  merged = merged.to(dtype);
  former_.reset();
  if (reversible) former_ = Former{weight, lora_A, lora_B, lora_magnitude_vector, base, adapter};
  if (is_quantized()) {
    unregister_module("base");
    base = nullptr;
  } else {
    parameters_.erase("weight");
  }
  drop_adapter();
  weight = register_parameter("weight", merged, /*requires_grad=*/false);
}

void LinearImpl::unmerge() {
  TORCH_CHECK(former_.has_value(),
              "nn::Linear: unmerge: expected a layer merged with reversible, received one without a former weight");
  Former former = *std::exchange(former_, std::nullopt);
  parameters_.erase("weight");
  weight = Tensor();
  if (former.weight.defined()) {
    weight = register_parameter("weight", former.weight.detach(), /*requires_grad=*/false);
  } else {
    base = register_module("base", former.base);
  }
  set_adapter(*former.adapter, former.lora_A.detach(), former.lora_B.detach(),
              former.magnitude.defined() ? former.magnitude.detach() : Tensor());
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::Linear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << (options.bias() ? "true" : "false");
  if (is_quantized()) stream << ", " << base->options.quantize().quant_type();
  if (has_adapter()) stream << ", rank=" << adapter->rank() << ", alpha=" << adapter->alpha() << (adapter->dora() ? ", dora" : "");
  stream << ")";
}

}  // namespace shoestring::nn
