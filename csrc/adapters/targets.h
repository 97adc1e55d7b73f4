#pragma once

// Selects the layers that lora::apply adapts, and the options of each of them, by the rules of PEFT.

#include <string>
#include <utility>
#include <vector>

#include <shoestring/adapters/lora.h>

namespace shoestring::lora {

/// Layers with their names.
using NamedLayers = std::vector<std::pair<std::string, nn::AdaptableLayer*>>;

/// Returns the layers of `module` that get an adapter. Modules inside `saved`, which are trained in full, get
/// none. Raises ValueError if an entry of an option matches nothing.
NamedLayers find_targets(const torch::nn::Module& module, const ApplyOptions& options,
                         const std::vector<std::string>& saved);

/// Returns the adapter options of the layer `name`: the rank and alpha of the first matching pattern, and for
/// IA3 whether feedforward_modules matches the name.
nn::AnyAdapterOptions own_options(const nn::AnyAdapterOptions& options, const std::string& name);

}  // namespace shoestring::lora
