#include <fstream>
#include <map>

#include <ATen/Functions.h>

#include <shoestring/lora.h>
#include <shoestring/safetensors.h>

#include "lora/names.h"
#include "lora/peft_config.h"

namespace shoestring::lora {
namespace {

using at::Tensor;

// What a file holds for the layers of a module, checked against them.
struct Step {
  nn::AdaptedLayer* layer;
  nn::AnyAdapterOptions options;
  nn::AdapterImpl::Tensors values;
};

std::string shapes_of(const nn::AdaptedLayer::Shapes& shapes) {
  std::map<std::string, std::vector<int64_t>> sorted;
  for (const auto& item : shapes) sorted[item.key()] = item.value();
  std::string text;
  for (const auto& [name, shape] : sorted) text += c10::str(text.empty() ? "" : ", ", name, " ", at::IntArrayRef(shape));
  return text.empty() ? "nothing" : text;
}

// A layer's own options: its rank is that of its tensors.
nn::AnyAdapterOptions own_options(const FileConfig& config, const std::string& name, const nn::AdapterImpl::Tensors& values) {
  auto lora = std::get<nn::AdapterOptions>(config.options);
  const Tensor* A = values.find("lora_A");
  if (A != nullptr && A->dim() == 2 && A->size(0) > 0) lora.rank(A->size(0));
  return lora.alpha(config.alpha(name));
}

std::map<std::string, Step> plan(const torch::nn::Module& module, const SafetensorsFile& file, const FileConfig& config) {
  const std::string place = "lora::load_adapter: " + file.path();
  std::map<std::string, nn::AdaptedLayer*> layers;
  for (const auto& [name, layer] : all_of<nn::AdaptedLayer>(module)) layers[name] = layer;
  std::map<std::string, Step> steps;
  for (const auto& entry : file.entries()) {
    const bool known = entry.name.starts_with(kPrefix);
    const auto [name, parameter] = split_key(known ? entry.name.substr(std::string(kPrefix).size()) : "");
    TORCH_CHECK_VALUE(!parameter.empty() && at::isFloatingType(entry.dtype), place, ": expected floating-point tensors ", kPrefix,
                      "<module>.lora_A.weight and such, received ", entry.name, " of ", entry.dtype);
    TORCH_CHECK_VALUE(layers.count(name) > 0, place, ": ", name,
                      ": expected a layer of shoestring::nn in the module, found none of that name");
    steps[name].layer = layers[name];
    steps[name].values.insert(parameter, file.load(entry.name));
  }
  for (auto& [name, step] : steps) {
    step.options = own_options(config, name, step.values);
    check_adapter(place, step.options);
    const auto expected = step.layer->shapes(step.options, place, name);
    nn::AdaptedLayer::Shapes received;
    for (const auto& item : step.values) received.insert(item.key(), item.value().sizes().vec());
    TORCH_CHECK_VALUE(shapes_of(expected) == shapes_of(received), place, ": ", name, ": expected ", shapes_of(expected), ", received ",
                      shapes_of(received));
  }
  return steps;
}

}  // namespace

void load_adapter(torch::nn::Module& module, const std::string& directory, const std::string& adapter_name) {
  check_name("lora::load_adapter", adapter_name);
  const std::string own = directory + "/" + adapter_name;
  const bool nested = adapter_name != "default" && std::ifstream(own + "/" + kConfig).good();
  const std::string folder = nested ? own : directory;
  const FileConfig config = read_config(folder + "/" + kConfig);
  const SafetensorsFile file(folder + "/" + kWeights);
  auto steps = plan(module, file, config);
  for (const auto& [name, layer] : adapted_layers(module)) {
    TORCH_CHECK_VALUE(!layer->has_adapter(adapter_name) || steps.count(name) > 0, "lora::load_adapter: ", folder,
                      ": expected values for ", name, ", which has an adapter '", adapter_name, "'; found none");
  }

  for (auto& parameter : module.parameters()) parameter.requires_grad_(false);
  for (auto& [name, step] : steps) {
    // What one that changed the base took out goes back: the file is for that.
    if (step.layer->has_adapter(adapter_name) && step.layer->adapters[adapter_name]->has("initial_A")) {
      step.layer->delete_adapter(adapter_name);
    }
    step.layer->put_adapter(adapter_name, step.options, step.values);
  }
  set_adapter(module, {adapter_name});
}

}  // namespace shoestring::lora
