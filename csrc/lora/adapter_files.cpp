#include <algorithm>
#include <fstream>
#include <map>
#include <regex>
#include <set>

#include <nlohmann/json.hpp>

#include <shoestring/lora.h>
#include <shoestring/safetensors.h>

#include "io/atomic_file.h"
#include "lora/names.h"

namespace shoestring::lora {
namespace {

using at::Tensor;
using Json = nlohmann::json;
using nn::LinearImpl;

constexpr const char* kConfig = "adapter_config.json";
constexpr const char* kWeights = "adapter_model.safetensors";
const std::string kPrefix = "base_model.model.";
const std::string kA = ".lora_A.weight", kB = ".lora_B.weight", kMagnitude = ".lora_magnitude_vector";

std::string last_part(const std::string& name) { return name.substr(name.rfind('.') + 1); }

// A list that, by PEFT's rules, means exactly these layers: last parts of names where these suffice.
std::vector<std::string> shortest_names(const torch::nn::Module& module, const std::set<std::string>& chosen) {
  std::set<std::string> last, meant;
  for (const auto& name : chosen) last.insert(last_part(name));
  const std::vector<std::string> list(last.begin(), last.end());
  for (const auto& child : module.named_modules("", false)) {
    if (matches(child.key(), list)) meant.insert(child.key());
  }
  return meant == chosen ? list : std::vector<std::string>(chosen.begin(), chosen.end());
}

Json describe(const torch::nn::Module& module, const std::vector<std::pair<std::string, LinearImpl*>>& layers) {
  const auto& first = *layers.front().second->adapter;
  std::set<std::string> names;
  Json ranks = Json::object(), alphas = Json::object();
  for (const auto& [name, linear] : layers) {
    names.insert(name);
    TORCH_CHECK_VALUE(linear->adapter->dora() == first.dora(), "lora::save_adapter: module: expected DoRA in all layers or "
                      "in none, since a file has one word for all, received ", name, " unlike the first");
    if (linear->adapter->rank() != first.rank()) ranks["^" + name] = linear->adapter->rank();
    if (linear->adapter->alpha() != first.alpha()) alphas["^" + name] = linear->adapter->alpha();
  }
  return {{"peft_type", "LORA"},
          {"task_type", nullptr},
          {"base_model_name_or_path", nullptr},
          {"r", first.rank()},
          {"lora_alpha", first.alpha()},
          {"lora_dropout", first.dropout()},
          {"target_modules", shortest_names(module, names)},
          {"rank_pattern", ranks},
          {"alpha_pattern", alphas},
          {"use_rslora", first.rslora()},
          {"use_dora", first.dora()},
          {"bias", "none"},
          {"fan_in_fan_out", false},
          {"lora_bias", false},
          {"modules_to_save", nullptr},
          {"init_lora_weights", true},
          {"inference_mode", true}};
}

// Options of PEFT's that change what an adapter computes; where they are on, the adapter is refused.
const char* const kUnsupported[] = {"fan_in_fan_out",          "lora_bias",    "modules_to_save", "layer_replication",
                                    "target_parameters",       "use_qalora",   "use_bdlora",      "arrow_config",
                                    "trainable_token_indices", "kasa_config",  "velora_config",   "megatron_config",
                                    "alora_invocation_tokens", "monteclora_config"};

bool is_off(const Json& value) {
  return value.is_null() || value == false || ((value.is_array() || value.is_object()) && value.empty());
}

Json read_config(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file.good(), "lora::load_adapter: ", path, ": expected a file, found none that can be read");
  const Json config = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(config.is_object(), "lora::load_adapter: ", path, ": expected a JSON object, received something else");
  TORCH_CHECK_VALUE(config.value("peft_type", Json()) == "LORA", "lora::load_adapter: ", path,
                    ": peft_type: expected LORA, received ", config.value("peft_type", Json()).dump());
  for (const char* option : kUnsupported) {
    const Json value = config.value(option, Json());
    TORCH_CHECK_VALUE(is_off(value), "lora::load_adapter: ", path, ": ", option,
                      ": expected none, since nothing else is supported here, received ", value.dump());
  }
  const Json bias = config.value("bias", Json());
  TORCH_CHECK_VALUE(bias.is_null() || bias == "none", "lora::load_adapter: ", path,
                    ": bias: expected none, since nothing else is supported here, received ", bias.dump());
  for (const char* number : {"lora_alpha", "lora_dropout"}) {
    const Json value = config.value(number, Json(0));
    TORCH_CHECK_VALUE(value.is_number(), "lora::load_adapter: ", path, ": ", number, ": expected a number, received ",
                      value.dump());
  }
  return config;
}

// PEFT's rule: the first pattern that matches the name, or what it ends with after a dot.
double by_pattern(const Json& patterns, const std::string& name, double otherwise) {
  if (!patterns.is_object()) return otherwise;
  for (const auto& [pattern, value] : patterns.items()) {
    if (!value.is_number()) continue;
    try {
      if (std::regex_match(name, std::regex("(.*\\.)?(" + pattern + ")"))) return value.get<double>();
    } catch (const std::regex_error&) {
      TORCH_CHECK_VALUE(false, "lora::load_adapter: alpha_pattern: expected a regular expression, received ", pattern);
    }
  }
  return otherwise;
}

}  // namespace

void save_adapter(const torch::nn::Module& module, const std::string& directory) {
  std::vector<std::pair<std::string, LinearImpl*>> layers;
  for (const auto& layer : linears(module)) {
    if (layer.second->has_adapter()) layers.push_back(layer);
  }
  TORCH_CHECK_VALUE(!layers.empty(), "lora::save_adapter: module: expected one with adapters, received one without");
  TensorDict tensors;
  for (const auto& [name, linear] : layers) {
    tensors.insert(kPrefix + name + kA, linear->lora_A.detach());
    tensors.insert(kPrefix + name + kB, linear->lora_B.detach());
    if (linear->adapter->dora()) tensors.insert(kPrefix + name + kMagnitude, linear->lora_magnitude_vector.detach());
  }
  make_folders("lora::save_adapter", directory);
  save_safetensors(directory + "/" + kWeights, tensors, {{"format", "pt"}});
  const std::string text = describe(module, layers).dump(2) + "\n";
  AtomicFile file("lora::save_adapter", directory + "/" + kConfig);
  file.write(text.data(), static_cast<int64_t>(text.size()));
  file.commit();
}

void load_adapter(torch::nn::Module& module, const std::string& directory) {
  const Json config = read_config(directory + "/" + kConfig);
  const std::string path = directory + "/" + kWeights;
  const SafetensorsFile file(path);
  const bool dora = config.value("use_dora", Json()) == true;
  std::set<std::string> names;
  for (const auto& entry : file.entries()) {
    std::string name = entry.name;
    bool known = false;
    for (const auto& part : {kA, kB, kMagnitude}) {
      if (known || !name.starts_with(kPrefix) || !name.ends_with(part) || (part == kMagnitude && !dora)) continue;
      name = name.substr(kPrefix.size(), name.size() - kPrefix.size() - part.size());
      known = true;
    }
    TORCH_CHECK_VALUE(known && file.contains(kPrefix + name + kA) && file.contains(kPrefix + name + kB) &&
                          file.contains(kPrefix + name + kMagnitude) == dora,
                      "lora::load_adapter: ", path, ": expected ", kPrefix, "<module>", kA, " and ", kB,
                      dora ? " and " + kMagnitude : "", ", together, received ", entry.name);
    names.insert(name);
  }
  std::map<std::string, LinearImpl*> layers;
  for (const auto& [name, linear] : linears(module)) layers[name] = linear;
  struct Values {
    Tensor A, B, magnitude;
  };
  std::map<std::string, Values> values;
  for (const auto& name : names) {
    TORCH_CHECK_VALUE(layers.count(name) > 0, "lora::load_adapter: ", path, ": ", name,
                      ": expected a shoestring::nn::Linear in the module, found none of that name");
    const auto& options = layers[name]->options;
    Tensor A = file.load(kPrefix + name + kA), B = file.load(kPrefix + name + kB);
    TORCH_CHECK_VALUE(A.dim() == 2 && B.dim() == 2 && A.size(1) == options.in_features() &&
                          B.size(0) == options.out_features() && A.size(0) == B.size(1) && A.size(0) > 0 &&
                          at::isFloatingType(A.scalar_type()) && at::isFloatingType(B.scalar_type()),
                      "lora::load_adapter: ", path, ": ", name, ": expected lora_A and lora_B of shapes (rank, ",
                      options.in_features(), ") and (", options.out_features(), ", rank), received ", A.sizes(), " and ",
                      B.sizes());
    const Tensor magnitude = dora ? file.load(kPrefix + name + kMagnitude) : Tensor();
    TORCH_CHECK_VALUE(!dora || (magnitude.dim() == 1 && magnitude.size(0) == options.out_features() &&
                                at::isFloatingType(magnitude.scalar_type())),
                      "lora::load_adapter: ", path, ": ", name, kMagnitude, ": expected shape (", options.out_features(),
                      "), received ", magnitude.sizes());
    values[name] = {A, B, magnitude};
  }
  for (const auto& [name, linear] : layers) {
    TORCH_CHECK_VALUE(!linear->has_adapter() || values.count(name) > 0, "lora::load_adapter: ", path,
                      ": expected values for ", name, ", which has an adapter; found none");
  }

  for (auto& parameter : module.parameters()) parameter.requires_grad_(false);
  for (const auto& [name, own] : values) {
    const auto options = nn::AdapterOptions()
                             .rank(own.A.size(0))
                             .dora(dora)
                             .alpha(by_pattern(config.value("alpha_pattern", Json()), name, config.value("lora_alpha", 8.0)))
                             .rslora(config.value("use_rslora", Json()) == true)
                             .dropout(config.value("lora_dropout", 0.0));
    layers[name]->load_adapter(options, own.A, own.B, own.magnitude);
  }
}

}  // namespace shoestring::lora
