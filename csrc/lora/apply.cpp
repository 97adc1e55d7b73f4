#include <algorithm>
#include <map>

#include <shoestring/lora.h>

#include "lora/initialize.h"
#include "lora/names.h"

namespace shoestring::lora {

using nn::AdaptedLayer;
using nn::LinearImpl;

namespace {

std::vector<std::pair<std::string, AdaptedLayer*>> targets(const torch::nn::Module& module, const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, AdaptedLayer*>> found;
  if (names.empty()) {
    for (const auto& [name, linear] : all_of<LinearImpl>(module)) found.emplace_back(name, linear);
  }
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    if (!matches(child.key(), names)) continue;
    auto* layer = dynamic_cast<AdaptedLayer*>(child.value().get());
    TORCH_CHECK_VALUE(layer != nullptr, "lora::apply: target_modules: expected shoestring::nn::Linear layers, received ",
                      child.key(), ", a ", child.value()->name(), "; declare it as shoestring::nn::Linear");
    found.emplace_back(child.key(), layer);
  }
  TORCH_CHECK_VALUE(!found.empty(), "lora::apply: target_modules: expected names of shoestring::nn::Linear layers, "
                    "received names that match none of the module's ", all_of<LinearImpl>(module).size());
  return found;
}

}  // namespace

std::vector<std::string> apply(torch::nn::Module& module, const LoraOptions& options) {
  check_adapter("lora::apply", options.adapter());
  check_name("lora::apply", options.adapter_name());
  check_quantize("lora::apply", options.quantize(), options.block_size(), options.nested());
  const auto known = adapter_names(module);
  TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), options.adapter_name()) == known.end(), "lora::apply: adapter_name: "
                    "expected a new one, but the module has an adapter '", options.adapter_name(), "'; merge or delete it first");
  const auto found = targets(module, options.target_modules());
  for (const auto& [name, layer] : found) layer->shapes(options.adapter(), "lora::apply", name);
  const bool quantize = options.quantize() != "none";
  const auto form = QuantizeOptions().quant_type(options.quantize()).block_size(options.block_size());
  const auto* lora = std::get_if<nn::AdapterOptions>(&options.adapter());
  const bool changes_base = lora != nullptr && lora->changes_base();
  for (const auto& [name, layer] : found) {
    const auto* linear = dynamic_cast<const LinearImpl*>(layer);
    TORCH_CHECK_VALUE(!changes_base || lora->init() != "loftq" || quantize || linear->is_quantized(), "lora::apply: init: expected "
                      "'loftq' with quantize, since it divides between the two what quantising loses; received quantize 'none'");
  }

  for (auto& parameter : module.parameters()) parameter.requires_grad_(false);
  const auto quantized = [&](LinearImpl& linear) {
    if (quantize && !linear.is_quantized() && !linear.has_adapter()) linear.quantize(form, options.nested());
  };
  std::map<AdaptedLayer*, nn::AdapterImpl::Tensors> taken;
  for (const auto& [name, layer] : found) {
    if (!changes_base) break;
    auto& linear = dynamic_cast<LinearImpl&>(*layer);  // before the weight is quantised: what is left is
    taken[layer] = take_out(linear, *lora, quantize ? &form : nullptr, options.nested());
    quantized(linear);
  }
  for (const auto& [name, linear] : all_of<LinearImpl>(module)) quantized(*linear);
  std::vector<std::string> names;
  for (const auto& [name, layer] : found) {
    layer->add_adapter(options.adapter(), options.adapter_name(), taken[layer]);
    names.push_back(name);
  }
  set_adapter(module, {options.adapter_name()});
  return names;
}

}  // namespace shoestring::lora
