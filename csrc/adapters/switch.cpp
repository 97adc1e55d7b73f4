// Selects which of a module's adapters are in use: set_adapter, delete_adapter and the guards of lora.h.
#include <algorithm>

#include <ATen/Functions.h>

#include <shoestring/adapters/lora.h>

#include "adapters/names.h"
#include "adapters/trained_copy.h"

namespace shoestring::lora {

std::vector<std::string> adapter_names(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& [module_name, layer] : adapted_layers(module)) {
    for (const auto& item : layer->adapters) {
      if (std::find(names.begin(), names.end(), item.key()) == names.end()) names.push_back(item.key());
    }
  }
  return names;
}

std::vector<std::pair<std::string, at::Tensor>> base_biases(const torch::nn::Module& module,
                                                            const std::string& which) {
  std::vector<std::pair<std::string, at::Tensor>> biases;
  if (which == "none") return biases;
  std::vector<std::string> copied, adapted;
  for (const auto& [name, copy] : trained_copies(module)) copied.push_back(name);
  for (const auto& [name, layer] : adapted_layers(module))
    adapted.push_back(name.empty() ? "bias" : name + ".bias");
  for (const auto& item : module.named_parameters()) {
    const std::string& name = item.key();
    if ((name != "bias" && !name.ends_with(".bias")) || is_inside(name, copied)) continue;
    const bool of_layer = std::find(adapted.begin(), adapted.end(), name) != adapted.end();
    if (which == "all" || of_layer) biases.emplace_back(name, item.value());
  }
  return biases;
}

void set_adapter(torch::nn::Module& module, const std::vector<std::string>& names) {
  check_known("lora::set_adapter", module, names);
  const auto is_activated = [&](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const auto& [module_name, copy] : trained_copies(module)) {
    const auto chosen = std::count_if(copy->adapters.begin(), copy->adapters.end(), is_activated);
    TORCH_CHECK_VALUE(chosen <= 1 || copy->merged,
                      "lora::set_adapter: adapter_names: expected at most one adapter with a trained copy "
                      "(modules_to_save) of ",
                      module_name, ", received ", listed(names));
  }
  std::string biases = "none";
  for (const auto& [module_name, layer] : adapted_layers(module)) {
    layer->active = names;
    for (auto& item : layer->adapters) {
      for (auto& tensor : item.value()->tensors) tensor.value().requires_grad_(is_activated(item.key()));
      if (is_activated(item.key()) && item.value()->bias != "none") biases = item.value()->bias;
    }
  }
  for (auto& [name, bias] : base_biases(module, "all")) bias.requires_grad_(false);
  for (auto& [name, bias] : base_biases(module, biases)) bias.requires_grad_(true);
  for (const auto& [module_name, copy] : trained_copies(module)) {
    if (!copy->merged) copy->use(names, copy->enabled);
  }
}

void delete_adapter(torch::nn::Module& module, const std::string& adapter_name) {
  check_known("lora::delete_adapter", module, {adapter_name});
  for (const auto& [module_name, layer] : adapted_layers(module)) {
    std::erase(layer->active, adapter_name);
    if (layer->has_adapter(adapter_name)) layer->delete_adapter(adapter_name);
  }
  for (const auto& [module_name, copy] : trained_copies(module)) {
    if (copy->merged) continue;
    if (copy->has(adapter_name)) copy->remove(adapter_name);
    if (copy->adapters.empty()) copy->detach();
  }
}

DisableAdapterGuard::DisableAdapterGuard(torch::nn::Module& module) {
  for (const auto& [module_name, layer] : adapted_layers(module)) {
    const bool former = std::exchange(layer->enabled, false);
    restore_.push_back([layer, former] { layer->enabled = former; });
  }
  for (const auto& [module_name, copy] : trained_copies(module)) {
    if (copy->merged) continue;
    const bool former = copy->enabled;
    copy->use(copy->active, false);
    restore_.push_back([copy, former] { copy->use(copy->active, former); });
  }
}

DisableAdapterGuard::~DisableAdapterGuard() {
  for (const auto& restore : restore_) restore();
}

AdaptersPerRowGuard::AdaptersPerRowGuard(torch::nn::Module& module,
                                         const std::vector<std::optional<std::string>>& adapter_names) {
  std::vector<std::string> chosen;
  for (const auto& name : adapter_names) {
    if (name.has_value() && std::find(chosen.begin(), chosen.end(), *name) == chosen.end())
      chosen.push_back(*name);
  }
  check_known("lora::AdaptersPerRowGuard", module, chosen);
  const char* expected =
      "lora::AdaptersPerRowGuard: adapter_names: expected adapters that only add to layers, received '";
  for (const auto& [module_name, layer] : adapted_layers(module)) {
    for (const auto& name : chosen) {
      const bool adds = !layer->has_adapter(name) ||
                        !std::holds_alternative<nn::IA3Options>(layer->adapters[name]->options);
      TORCH_CHECK_VALUE(adds, expected, name, "', which is an IA3 adapter in ", module_name);
    }
  }
  for (const auto& [module_name, copy] : trained_copies(module)) {
    for (const auto& name : chosen) {
      TORCH_CHECK_VALUE(!copy->has(name), expected, name, "', which has a trained copy (modules_to_save) of ",
                        module_name);
    }
  }
  for (const auto& [module_name, layer] : adapted_layers(module)) {
    nn::AdaptableLayer::Rows rows;
    std::vector<at::Tensor> columns;
    for (const auto& name : chosen) {
      if (!layer->has_adapter(name)) continue;
      rows.names.push_back(name);
      std::vector<float> uses;
      for (const auto& row : adapter_names) uses.push_back(row == name);
      columns.push_back(at::tensor(uses));
    }
    rows.uses =
        columns.empty() ? at::zeros({static_cast<int64_t>(adapter_names.size()), 0}) : at::stack(columns, 1);
    rows.uses = rows.uses.to(layer->base_weight().device());
    layer->rows = rows;
    layers_.push_back(layer);
  }
}

AdaptersPerRowGuard::~AdaptersPerRowGuard() {
  for (auto* layer : layers_) layer->rows.reset();
}

}  // namespace shoestring::lora
