#include <shoestring/adapters/adaptable_linear.h>
#include <shoestring/integrations/quantized_training.h>

#include "adapters/names.h"

namespace shoestring {

using nn::AdaptableLinearImpl;

std::vector<std::string> prepare_quantized(torch::nn::Module& module,
                                           const PrepareQuantizedOptions& options) {
  constexpr const char* kOp = "prepare_quantized";
  const auto& form = options.quantize();
  TORCH_CHECK_VALUE(form.quant_type() != "none", kOp,
                    ": quantize: expected nf4, fp4, int4 or int8, received 'none'");
  lora::check_quantize(kOp, form.quant_type(), form.block_size(), options.double_quant());
  std::vector<std::string> known;
  for (const auto& [name, each] : lora::modules(module)) {
    if (!name.empty()) known.push_back(name);
  }
  lora::check_matched("prepare_quantized: target_modules", options.target_modules(), known);
  lora::check_matched("prepare_quantized: skip", options.skip(), known);
  std::vector<std::pair<std::string, AdaptableLinearImpl*>> dense_layers;
  for (const auto& [name, each] : lora::modules(module)) {
    auto* layer = dynamic_cast<AdaptableLinearImpl*>(each);
    const bool all = options.target_modules().empty();
    if (!(all ? layer != nullptr : !name.empty() && lora::matches(name, options.target_modules()))) continue;
    if (lora::matches(name, options.skip())) continue;
    TORCH_CHECK_VALUE(layer != nullptr, kOp,
                      ": target_modules: expected shoestring::nn::AdaptableLinear layers, received ", name,
                      ", a ", each->name(), "; declare it as one of these");
    if (all && layer->is_fake_quantized()) continue;
    const char* const kind = layer->is_quantized()        ? "quantised"
                             : layer->has_adapter()       ? "adapted"
                             : layer->is_fake_quantized() ? "prepared already"
                                                          : nullptr;
    TORCH_CHECK_VALUE(kind == nullptr, kOp, ": module: expected dense layers without adapters, received ",
                      name, ", which is ", kind, "; name it in skip");
    dense_layers.emplace_back(name, layer);
  }
  TORCH_CHECK_VALUE(!dense_layers.empty(), kOp,
                    ": module: expected shoestring::nn::AdaptableLinear layers, received none");
  std::vector<std::string> names;
  for (const auto& [name, layer] : dense_layers) {
    layer->fake_quantize(form, options.double_quant());
    names.push_back(name);
  }
  return names;
}

std::vector<std::string> convert_quantized(torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& [name, layer] : lora::all_of<AdaptableLinearImpl>(module)) {
    if (!layer->is_fake_quantized()) continue;
    layer->convert_quantized();
    names.push_back(name);
  }
  TORCH_CHECK_VALUE(
      !names.empty(),
      "convert_quantized: module: expected layers that prepare_quantized prepared, received none");
  return names;
}

}  // namespace shoestring
