#pragma once

#include <string>
#include <utility>
#include <vector>

#include <shoestring/nn/adapter.h>

namespace shoestring::lora {

/// A target is a name, or what a name ends with after a dot.
bool matches(const std::string& name, const std::vector<std::string>& targets);

/// A list that, by this rule, means exactly these modules: last parts of names where these suffice.
std::vector<std::string> shortest_names(const torch::nn::Module& module,
                                        const std::vector<std::string>& chosen);

/// The modules by name, in their order; the module itself has the name "".
std::vector<std::pair<std::string, torch::nn::Module*>> modules(const torch::nn::Module& module);

/// Raises ValueError for names that match none of the known ones, in the name of the caller and its argument.
void check_matched(const std::string& argument, const std::vector<std::string>& names,
                   const std::vector<std::string>& known);

/// Those of one class, or with one interface.
template <class Layer>
std::vector<std::pair<std::string, Layer*>> all_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, Layer*>> found;
  for (const auto& [name, each] : modules(module)) {
    if (auto* layer = dynamic_cast<Layer*>(each)) found.emplace_back(name, layer);
  }
  return found;
}

/// Those that have adapters now.
std::vector<std::pair<std::string, nn::AdaptedLayer*>> adapted_layers(const torch::nn::Module& module);

/// The base's own biases by name, PEFT's rule: "all"; "lora_only" and "vera_only" those of layers with
/// adapters; "none".
std::vector<std::pair<std::string, at::Tensor>> base_biases(const torch::nn::Module& module,
                                                            const std::string& which);

/// Raise ValueError, in the caller's name, for options, names and forms that there are not.
void check_adapter(const std::string& caller, const nn::AnyAdapterOptions& options);
/// bias: what an adapter of this kind may train of the base.
void check_bias(const std::string& caller, const nn::AnyAdapterOptions& options, const std::string& bias);
void check_name(const std::string& caller, const std::string& adapter_name);
void check_known(const std::string& caller, const torch::nn::Module& module,
                 const std::vector<std::string>& names);
void check_quantize(const std::string& caller, const std::string& quantize, int64_t block_size, bool nested);

/// "a, b", or "none".
std::string listed(const std::vector<std::string>& names);

}  // namespace shoestring::lora
