#pragma once

#include <string>
#include <utility>
#include <vector>

#include <shoestring/nn/adapter.h>

namespace shoestring::lora {

/// Returns whether `name` equals a target or ends with a dot and a target.
bool matches(const std::string& name, const std::vector<std::string>& targets);

/// Returns a list of targets that selects exactly the chosen modules by the rule of matches(). The list holds
/// the last components of their names if these suffice, else the full names.
std::vector<std::string> shortest_names(const torch::nn::Module& module,
                                        const std::vector<std::string>& chosen);

/// Returns all modules in their order, by name. `module` itself has the name "".
std::vector<std::pair<std::string, torch::nn::Module*>> modules(const torch::nn::Module& module);

/// Raises ValueError if one of `names` matches none of the known names. `argument` (caller and argument)
/// begins the message.
void check_matched(const std::string& argument, const std::vector<std::string>& names,
                   const std::vector<std::string>& known);

/// Returns the modules that are of class Layer or derived from it.
template <class Layer>
std::vector<std::pair<std::string, Layer*>> all_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, Layer*>> found;
  for (const auto& [name, each] : modules(module)) {
    if (auto* layer = dynamic_cast<Layer*>(each)) found.emplace_back(name, layer);
  }
  return found;
}

/// Returns the layers of `module` that have at least one adapter.
std::vector<std::pair<std::string, nn::AdaptedLayer*>> adapted_layers(const torch::nn::Module& module);

/// Returns the biases of the base by name, as PEFT selects them. "all" selects every bias. "lora_only" and
/// "vera_only" select the biases of layers with adapters. Biases inside modules_to_save are never selected.
std::vector<std::pair<std::string, at::Tensor>> base_biases(const torch::nn::Module& module,
                                                            const std::string& which);

/// Raise ValueError for invalid options, for names that do not exist and for unsupported quantised types.
/// `caller` begins the message.
void check_adapter(const std::string& caller, const nn::AnyAdapterOptions& options);
/// bias: which biases of the base an adapter of this kind may train.
void check_bias(const std::string& caller, const nn::AnyAdapterOptions& options, const std::string& bias);
void check_name(const std::string& caller, const std::string& adapter_name);
void check_known(const std::string& caller, const torch::nn::Module& module,
                 const std::vector<std::string>& names);
void check_quantize(const std::string& caller, const std::string& quantize, int64_t block_size, bool nested);

/// Returns "a, b", or "none" for an empty list.
std::string listed(const std::vector<std::string>& names);

}  // namespace shoestring::lora
