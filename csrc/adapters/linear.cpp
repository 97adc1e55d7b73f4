#include <cmath>
#include <utility>

#include <torch/nn/init.h>

#include <shoestring/adapters/adaptable_linear.h>
#include <shoestring/core/placeholder.h>

#include "adapters/low_rank.h"
#include "quantization/without_weight.h"

namespace shoestring::nn {

using at::Tensor;

QuantizedLinear without_weight(const AdaptableLinearOptions& options, const QuantizeOptions& quantize,
                               bool double_quant) {
  return quantization::without_weight(QuantizedLinearOptions(options.in_features(), options.out_features())
                                          .quantize(quantize)
                                          .double_quant(double_quant));
}

AdaptableLinearImpl::AdaptableLinearImpl(const AdaptableLinearOptions& options) : options(options) {
  reset();
}

// Creates the parameters of the linear layer. clone() calls reset() on the clone as well, and copies the
// values afterwards. The clone therefore keeps the dtype, the quantised type and the adapters.
void AdaptableLinearImpl::reset() {
  const bool quantized = is_quantized();
  const auto form = quantized ? base->options : QuantizedLinearOptions(1, 1);
  const auto dtype = quantized ? base->dtype : weight.defined() ? weight.scalar_type() : at::kFloat;
  const auto former_adapters = std::exchange(adapters, decltype(adapters)());
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
      bias =
          register_parameter("bias", torch::empty({options.out_features()}, dtype).uniform_(-bound, bound));
    }
  }
  if (quantized) quantize(form.quantize(), form.double_quant());
  if (!former_adapters.is_empty()) freeze();
  for (const auto& item : former_adapters)
    adapters.insert(item.key(), std::dynamic_pointer_cast<AdapterImpl>(item.value()->clone()));
  register_adapters();
}

void AdaptableLinearImpl::quantize(const QuantizeOptions& quantize_options, bool double_quant) {
  TORCH_CHECK(
      !is_quantized() && !has_adapter(),
      "nn::AdaptableLinear: quantize: expected a dense layer without an adapter, received one that is ",
      is_quantized() ? "quantised already" : "adapted already");
  QuantizedLinear quantized = without_weight(options, quantize_options, double_quant);
  quantized->set_weight(weight.detach());
  set_base(quantized);
}

void AdaptableLinearImpl::fake_quantize(const QuantizeOptions& quantize_options, bool double_quant) {
  TORCH_CHECK(
      !is_quantized() && !has_adapter(),
      "nn::AdaptableLinear: fake_quantize: expected a dense layer without an adapter, received one that is ",
      is_quantized() ? "quantised already" : "adapted already");
  fake_ = Fake{quantize_options, double_quant};
}

void AdaptableLinearImpl::convert_quantized() {
  TORCH_CHECK(is_fake_quantized(),
              "nn::AdaptableLinear: convert_quantized: expected a layer with fake quantisation, received one "
              "without; call fake_quantize first, or quantize");
  const Fake form = *fake_;
  quantize(form.quantize, form.double_quant);
}

Tensor AdaptableLinearImpl::computed_weight() const {
  return fake_.has_value() ? shoestring::fake_quantize(weight, fake_->quantize, fake_->double_quant) : weight;
}

void AdaptableLinearImpl::set_quantized(const Tensor& bytes, const Tensor& scales, const Tensor& second,
                                        const QuantizeOptions& quantize_options, at::ScalarType dtype) {
  TORCH_CHECK(!has_adapter(),
              "nn::AdaptableLinear: set_quantized: expected a layer without an adapter, received one that is "
              "adapted");
  QuantizedLinear quantized = without_weight(options, quantize_options, second.defined());
  quantized->set_parts(bytes, scales, second, quantize_options);
  quantized->dtype = dtype;
  set_base(quantized);
}

void AdaptableLinearImpl::set_base(const QuantizedLinear& quantized) {
  if (is_quantized()) {
    unregister_module("base");
  } else {
    parameters_.erase("weight");
    weight = Tensor();
  }
  former_.reset();
  fake_.reset();
  base = register_module("base", quantized);
}

void AdaptableLinearImpl::set_dense(const Tensor& value) {
  if (is_quantized()) {
    unregister_module("base");
    base = nullptr;
  } else {
    parameters_.erase("weight");
  }
  weight = register_parameter("weight", value, /*requires_grad=*/false);
}

void AdaptableLinearImpl::set_weight(const Tensor& dense) {
  const torch::NoGradGuard no_grad;
  if (!is_quantized()) {
    weight.copy_(dense);
    return;
  }
  const auto dtype = base->dtype;
  base->set_weight(dense);
  base->dtype = dtype;
}

void AdaptableLinearImpl::delete_adapter(const std::string& adapter_name) {
  const Adapter* deleted = adapters.find(adapter_name);
  if (deleted != nullptr && (*deleted)->has("initial_A"))
    set_weight(low_rank_sum(dense_weight(), {taken_part(**deleted)}));
  AdaptableLayer::delete_adapter(adapter_name);
}

Tensor AdaptableLinearImpl::dense_weight() const {
  if (is_quantized()) return base->dequantize(at::kFloat);
  return weight.detach().to(weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

at::TensorOptions AdaptableLinearImpl::adapter_type() const {
  if (is_quantized()) return base->packed.options().dtype(at::kFloat);
  return weight.options()
      .dtype(weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
      .requires_grad(false);
}

void AdaptableLinearImpl::freeze() {
  if (weight.defined()) weight.requires_grad_(false);
  if (bias.defined()) bias.requires_grad_(false);
  // The weight saved by a reversible merge is dropped, because unmerge cannot undo a merge once an adapter
  // was added.
  former_.reset();
}

std::array<double, 2> AdaptableLinearImpl::merge(const MergeOptions& merge_options) {
  TORCH_CHECK(has_adapter(),
              "nn::AdaptableLinear: merge: expected a layer with an adapter, received one without");
  const torch::NoGradGuard no_grad;
  std::vector<std::string> names =
      merge_options.adapter_names().empty() ? active : merge_options.adapter_names();
  std::erase_if(names, [&](const auto& name) { return !has_adapter(name); });
  const auto exact = merged(names);
  const Tensor before = dense_weight();
  const auto dtype = is_quantized() ? base->dtype : weight.scalar_type();
  const Former former{weight, bias, base, adapters, active};
  unregister_adapters();
  if (is_quantized() && merge_options.requantize()) {
    QuantizedLinear again = without_weight(options, base->options.quantize(), base->options.double_quant());
    again->set_weight(exact["weight"]);
    again->dtype = dtype;
    set_base(again);
  } else {
    set_dense(exact["weight"].to(dtype));
  }
  auto error = merge_error(before, exact["weight"], dense_weight());
  if (const Tensor* sum = exact.find("bias")) {
    const Tensor value = sum->to(bias.defined() ? bias.scalar_type() : dtype);
    if (bias.defined()) {
      const auto more = merge_error(bias, *sum, value);
      error = {error[0] + more[0], error[1] + more[1]};
    }
    set_bias(value);
  }
  former_.reset();
  if (merge_options.reversible()) former_ = former;
  return error;
}

void AdaptableLinearImpl::set_bias(const Tensor& value) {
  if (bias.defined()) parameters_.erase("bias");
  bias = value.defined() ? register_parameter("bias", value, /*requires_grad=*/false) : Tensor();
  options.bias(value.defined());
}

void AdaptableLinearImpl::unmerge() {
  TORCH_CHECK(
      former_.has_value(),
      "nn::AdaptableLinear: unmerge: expected a layer that was merged with reversible=true, received one "
      "without a saved weight");
  const Former former = *std::exchange(former_, std::nullopt);
  const auto device = base_weight().device();
  if (former.weight.defined()) {
    set_dense(
        former.weight.to(device));  // the same tensor, if it is there, to which another layer may be tied
  } else {
    set_base(former.base);
    base->to(device);
  }
  set_bias(former.bias.defined() ? former.bias.detach().to(device) : Tensor());
  adapters = former.adapters;
  active = former.active;
  register_adapters();
  for (auto& item : adapters) item.value()->to(device);
}

void AdaptableLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::AdaptableLinear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << (options.bias() ? "true" : "false");
  if (is_quantized()) stream << ", " << base->options.quantize().quant_type();
  if (fake_.has_value()) stream << ", trained as " << fake_->quantize.quant_type();
  for (const auto& item : adapters)
    stream << (item.key() == adapters.front().key() ? ", adapters: " : ", ") << item.key();
  stream << ")";
}

}  // namespace shoestring::nn
