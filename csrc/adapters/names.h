#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <shoestring/adapters/adapter.h>

namespace shoestring::lora {

/// Returns whether `name` equals one of `targets`, or ends with a dot followed by one of them.
bool matches(const std::string& name, const std::vector<std::string>& targets);

/// Returns a list of target names for which matches() is true for exactly the chosen modules. Uses the last
/// components of the module names if they are unambiguous, else the full names.
std::vector<std::string> shortest_names(const torch::nn::Module& module,
                                        const std::vector<std::string>& chosen);

/// Returns all submodules with their full names, in the order of named_modules(). `module` itself comes first
/// with the name "".
std::vector<std::pair<std::string, torch::nn::Module*>> modules(const torch::nn::Module& module);

/// Returns whether a module's name, the first argument, matches one given name or pattern.
using Match = std::function<bool(const std::string& name, const std::string& pattern)>;

/// Raises ValueError if a name in `names` matches no name in `known`. `argument` begins the error message: it
/// names the calling function and that function's argument. `expected` describes the given names.
void check_matched(
    const std::string& argument, const std::vector<std::string>& names, const std::vector<std::string>& known,
    const Match& match = [](const auto& name, const auto& pattern) { return matches(name, {pattern}); },
    const char* expected = "names of modules");

/// Returns the submodules of class Layer or of a derived class, with their names.
template <class Layer>
std::vector<std::pair<std::string, Layer*>> all_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, Layer*>> layers;
  for (const auto& [name, each] : modules(module)) {
    if (auto* layer = dynamic_cast<Layer*>(each)) layers.emplace_back(name, layer);
  }
  return layers;
}

/// Returns the layers of `module` that have at least one adapter, with their names.
std::vector<std::pair<std::string, nn::AdaptableLayer*>> adapted_layers(const torch::nn::Module& module);

/// Returns the biases of the base model with their names, as PEFT's option `bias` selects them. "all" selects
/// every bias. "lora_only" and "vera_only" select the biases of layers with adapters. Biases inside
/// modules_to_save are never selected.
std::vector<std::pair<std::string, at::Tensor>> base_biases(const torch::nn::Module& module,
                                                            const std::string& which);

/// check_adapter, check_bias, check_name, check_known and check_quantize raise ValueError if an argument is
/// invalid: an adapter option, a name, or a quantised type. `caller`, the calling function, begins the error
/// message.
void check_adapter(const std::string& caller, const nn::AnyAdapterOptions& options);
/// bias: PEFT's option `bias`; see base_biases().
void check_bias(const std::string& caller, const nn::AnyAdapterOptions& options, const std::string& bias);
void check_name(const std::string& caller, const std::string& adapter_name);
void check_known(const std::string& caller, const torch::nn::Module& module,
                 const std::vector<std::string>& names);
void check_quantize(const std::string& caller, const std::string& quantize, int64_t block_size,
                    bool double_quant);

/// Joins names for an error message: "a, b", or "none" for an empty list.
std::string listed(const std::vector<std::string>& names);

}  // namespace shoestring::lora
