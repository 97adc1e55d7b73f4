// Which of a module's adapters are in use.
#include <algorithm>

#include <ATen/Functions.h>

#include <shoestring/lora.h>

#include "lora/names.h"

namespace shoestring::lora {

std::vector<std::string> adapter_names(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& [place, layer] : adapted_layers(module)) {
    for (const auto& item : layer->adapters) {
      if (std::find(names.begin(), names.end(), item.key()) == names.end()) names.push_back(item.key());
    }
  }
  return names;
}

void set_adapter(torch::nn::Module& module, const std::vector<std::string>& names) {
  check_known("lora::set_adapter", module, names);
  for (const auto& [place, layer] : adapted_layers(module)) {
    layer->active = names;
    for (auto& item : layer->adapters) {
      const bool used = std::find(names.begin(), names.end(), item.key()) != names.end();
      for (auto& tensor : item.value()->tensors) tensor.value().requires_grad_(used);
    }
  }
}

void delete_adapter(torch::nn::Module& module, const std::string& adapter_name) {
  check_known("lora::delete_adapter", module, {adapter_name});
  for (const auto& [place, layer] : adapted_layers(module)) {
    std::erase(layer->active, adapter_name);
    if (layer->has_adapter(adapter_name)) layer->delete_adapter(adapter_name);
  }
}

DisableAdapterGuard::DisableAdapterGuard(torch::nn::Module& module) {
  for (const auto& [place, layer] : adapted_layers(module)) former_.emplace_back(layer, std::exchange(layer->enabled, false));
}

DisableAdapterGuard::~DisableAdapterGuard() {
  for (const auto& [layer, enabled] : former_) layer->enabled = enabled;
}

AdaptersPerRowGuard::AdaptersPerRowGuard(torch::nn::Module& module,
                                         const std::vector<std::optional<std::string>>& adapter_names) {
  std::vector<std::string> chosen;
  for (const auto& name : adapter_names) {
    if (name.has_value() && std::find(chosen.begin(), chosen.end(), *name) == chosen.end()) chosen.push_back(*name);
  }
  check_known("lora::AdaptersPerRowGuard", module, chosen);
  for (const auto& [place, layer] : adapted_layers(module)) {
    nn::AdaptedLayer::Rows rows;
    std::vector<at::Tensor> columns;
    for (const auto& name : chosen) {
      if (!layer->has_adapter(name)) continue;
      rows.names.push_back(name);
      std::vector<float> uses;
      for (const auto& row : adapter_names) uses.push_back(row == name);
      columns.push_back(at::tensor(uses));
    }
    rows.uses = columns.empty() ? at::zeros({static_cast<int64_t>(adapter_names.size()), 0}) : at::stack(columns, 1);
    rows.uses = rows.uses.to(layer->base_weight().device());
    layer->rows = rows;
    layers_.push_back(layer);
  }
}

AdaptersPerRowGuard::~AdaptersPerRowGuard() {
  for (auto* layer : layers_) layer->rows.reset();
}

}  // namespace shoestring::lora
