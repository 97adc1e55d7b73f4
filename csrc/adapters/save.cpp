#include <algorithm>
#include <cmath>

#include <ATen/Functions.h>

#include <shoestring/adapters/lora.h>

#include "adapters/adapter_files.h"
#include "adapters/base_record.h"
#include "adapters/config_digest.h"
#include "adapters/names.h"
#include "adapters/trained_copy.h"
#include "files/atomic_file.h"

namespace shoestring::lora {
namespace {

using at::Tensor;

// Returns the tensors and options of an adapter as they are written to a file. If the adapter's
// initialisation changed the base weight, the written adapter has twice the rank and is meant for the
// original base weight.
std::pair<nn::AdapterImpl::Tensors, nn::AnyAdapterOptions> described(const nn::AdapterImpl& adapter) {
  if (!adapter.has("initial_A")) return {adapter.tensors, adapter.options};
  nn::AdapterImpl::Tensors tensors = adapter.tensors;
  tensors["lora_A"] = at::cat({adapter["lora_A"], adapter["initial_A"]});
  tensors["lora_B"] = at::cat({adapter["lora_B"], -adapter["initial_B"]}, 1);
  nn::LoraOptions options = *adapter.lora();
  const double scaling = options.scaling(), rank = 2.0 * static_cast<double>(options.rank());
  options.rank(2 * options.rank())
      .alpha(scaling * (options.rslora() ? std::sqrt(rank) : rank))
      .init("default");
  return {tensors, options};
}

void save_one(const torch::nn::Module& module, const std::string& directory,
              const std::string& adapter_name) {
  TensorDict tensors;
  std::vector<std::pair<std::string, nn::AnyAdapterOptions>> layers;
  std::vector<std::string> saved;
  std::string bias = "none";
  const auto add = [&](const std::string& key, const Tensor& value) {
    tensors.insert(key, value.detach().contiguous());
  };
  for (const auto& [name, layer] : adapted_layers(module)) {
    if (!layer->has_adapter(adapter_name)) continue;
    const nn::AdapterImpl& adapter = *layer->adapters[adapter_name];
    const auto [tensors, options] = described(adapter);
    for (const auto& item : tensors) add(kPrefix + name + "." + file_suffix(item.key()), item.value());
    const auto* vera = std::get_if<nn::VeraOptions>(&options);
    for (const char* matrix : {"vera_A", "vera_B"}) {
      if (vera != nullptr && vera->save_projection() && layers.empty())
        add(kShared + std::string(matrix), adapter[matrix]);
    }
    layers.emplace_back(name, options);
    bias = adapter.bias;
  }
  for (const auto& [name, copy] : trained_copies(module)) {
    if (copy->merged || !copy->has(adapter_name)) continue;
    for (const auto& [key, value] : copy->values(adapter_name)) add(kPrefix + name + "." + key, value);
    saved.push_back(name);
  }
  for (const auto& [name, value] : base_biases(module, bias)) {
    const std::string parent =
        name == "bias" ? "" : name.substr(0, name.size() - std::string(".bias").size());
    const bool adapted =
        std::any_of(layers.begin(), layers.end(), [&](const auto& layer) { return layer.first == parent; });
    add(kPrefix + (adapted ? parent + ".base_layer.bias" : name), value);
  }
  write_adapter(directory, tensors, to_file(module, layers, bias, saved),
                {{kBase, base_record(module, tensors)}});
}

}  // namespace

void write_adapter(const std::string& directory, const TensorDict& tensors, const Json& config,
                   Metadata metadata) {
  const std::string text = config.dump(2) + "\n";
  files::make_folders("lora::save_adapter", directory);
  metadata["format"] = "pt";
  metadata[kDigest] = config_digest(config);
  save_safetensors(directory + "/" + kWeights, tensors, metadata);
  files::AtomicFile file("lora::save_adapter", directory + "/" + kConfig);
  file.write(text.data(), static_cast<int64_t>(text.size()));
  file.commit();
}

void save_adapter(const torch::nn::Module& module, const std::string& directory,
                  const std::vector<std::string>& names) {
  check_known("lora::save_adapter", module, names);
  const auto chosen = names.empty() ? adapter_names(module) : names;
  TORCH_CHECK_VALUE(!chosen.empty(),
                    "lora::save_adapter: module: expected a module with adapters, received one without; call "
                    "lora::apply first");
  const torch::NoGradGuard no_grad;
  for (const auto& name : chosen)
    save_one(module, name == "default" ? directory : directory + "/" + name, name);
}

}  // namespace shoestring::lora
