#include <algorithm>
#include <map>

#include <shoestring/adapters/lora.h>

#include "adapters/initialize.h"
#include "adapters/names.h"
#include "adapters/targets.h"
#include "adapters/trained_copy.h"

namespace shoestring::lora {

using nn::AdaptableLayer;
using nn::AdaptableLinearImpl;

namespace {

// Draws the two random matrices that all VeRA layers share, large enough for the widest layer. Returns an
// empty dictionary for other kinds of adapter.
nn::AdapterImpl::Tensors shared(const nn::AnyAdapterOptions& options, const NamedLayers& layers) {
  const auto* vera = std::get_if<nn::VeraOptions>(&options);
  if (vera == nullptr) return nn::AdapterImpl::Tensors();
  int64_t in = 0, out = 0;
  for (const auto& [name, layer] : layers) {
    const auto& sizes = dynamic_cast<const AdaptableLinearImpl&>(*layer).options;
    in = std::max(in, sizes.in_features());
    out = std::max(out, sizes.out_features());
  }
  auto matrices = projection(*vera, in, out);
  for (auto& item : matrices) item.value() = item.value().to(layers.front().second->adapter_type());
  return matrices;
}

}  // namespace

std::vector<std::string> apply(torch::nn::Module& module, const ApplyOptions& options) {
  check_adapter("lora::apply", options.adapter());
  check_name("lora::apply", options.adapter_name());
  check_quantize("lora::apply", options.quantize(), options.block_size(), options.double_quant());
  const auto known = adapter_names(module);
  TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), options.adapter_name()) == known.end(),
                    "lora::apply: adapter_name: expected a new name, but the module has an adapter '",
                    options.adapter_name(), "'; merge or delete it first");
  check_bias("lora::apply", options.adapter(), options.bias());
  const auto saved = saved_modules("lora::apply", module, options.modules_to_save());
  const auto targets = find_targets(module, options, saved);
  for (const auto& [name, layer] : targets)
    layer->shapes(own_options(options.adapter(), name), "lora::apply", name);
  for (const auto& [name, layer] : adapted_layers(module)) {
    for (const auto& item : layer->adapters) {
      TORCH_CHECK_VALUE(options.bias() == "none" || item.value()->bias == "none",
                        "lora::apply: bias: expected 'none', since the "
                        "adapter '",
                        item.key(), "' trains the base's biases, received '", options.bias(), "'");
    }
  }
  const bool quantize = options.quantize() != "none";
  const auto form = QuantizeOptions().quant_type(options.quantize()).block_size(options.block_size());
  const auto* lora = std::get_if<nn::LoraOptions>(&options.adapter());
  const bool changes_base = lora != nullptr && lora->changes_base();
  for (const auto& [name, layer] : targets) {
    const auto* linear = dynamic_cast<const AdaptableLinearImpl*>(layer);
    TORCH_CHECK_VALUE(!changes_base || lora->init() != "loftq" || quantize || linear->is_quantized(),
                      "lora::apply: init: expected quantize with 'loftq', which fits the adapter to the "
                      "quantisation error; received quantize 'none'");
    TORCH_CHECK_VALUE(
        !changes_base || !shares_parameter(module, name),
        "lora::apply: init: expected layers with a weight of their own for '", lora->init(),
        "', which changes the weight, received ", name,
        ", whose weight another module has as well; give one of the modules a copy of the weight");
  }

  for (auto& parameter : module.parameters()) parameter.requires_grad_(false);
  const auto quantized = [&](AdaptableLinearImpl& linear) {
    if (quantize && !linear.is_quantized() && !linear.has_adapter())
      linear.quantize(form, options.double_quant());
  };
  std::map<AdaptableLayer*, nn::AdapterImpl::Tensors> taken_out;
  for (const auto& [name, layer] : targets) {
    if (!changes_base) break;
    // PiSSA, OLoRA and LoftQ initialise the adapter from the unquantised weight and subtract the adapter's
    // product. Only the remaining weight is quantised.
    auto& linear = dynamic_cast<AdaptableLinearImpl&>(*layer);
    const auto lora = std::get<nn::LoraOptions>(own_options(options.adapter(), name));
    taken_out[layer] = take_out(linear, lora, quantize ? &form : nullptr, options.double_quant());
    quantized(linear);
  }
  for (const auto& [name, linear] : all_of<AdaptableLinearImpl>(module)) {
    if (!is_inside(name, saved)) quantized(*linear);  // modules in modules_to_save are trained and stay dense
  }
  const auto matrices = shared(options.adapter(), targets);
  std::vector<std::string> names;
  for (const auto& [name, layer] : targets) {
    const auto matrices_of_layer = taken_out.find(layer);
    layer->add_adapter(own_options(options.adapter(), name), options.adapter_name(),
                       matrices_of_layer != taken_out.end() ? matrices_of_layer->second : matrices);
    layer->adapters[options.adapter_name()]->bias = options.bias();
    names.push_back(name);
  }
  for (const auto& name : saved) add_copy(module, name, options.adapter_name());
  set_adapter(module, {options.adapter_name()});
  return names;
}

}  // namespace shoestring::lora
