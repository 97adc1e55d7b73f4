#include <unistd.h>

#include <algorithm>
#include <map>

#include <ATen/Functions.h>

#include <shoestring/adapters/lora.h>

#include "adapters/adapter_files.h"
#include "adapters/base_record.h"
#include "adapters/config_digest.h"
#include "adapters/initialize.h"
#include "adapters/names.h"
#include "adapters/trained_copy.h"
#include "files/safetensors_format.h"

namespace shoestring::lora {
namespace {

using at::Tensor;
using Tensors = nn::AdapterImpl::Tensors;

// Content of an adapter file: its tensors by purpose, after a check against the module's names and shapes.
struct Content {
  struct Layer {
    nn::AdaptableLayer* layer = nullptr;
    nn::AnyAdapterOptions options;
    Tensors values;
  };
  std::map<std::string, Layer> layers;
  std::map<std::string, std::map<std::string, Tensor>>
      copies;  // for each module in modules_to_save: its tensors, by tensor name
  // Pairs of a parameter of the base, a bias or the weight of an embedding or output layer, and its new
  // value.
  std::vector<std::pair<Tensor, Tensor>> base;
  // Pairs of a layer with a quantised weight and the weight's new value.
  std::vector<std::pair<nn::AdaptableLinearImpl*, Tensor>> quantized;
  // The file's vera_A and vera_B, which all VeRA layers share.
  Tensors projection;
};

std::string listed_shapes(const nn::AdaptableLayer::Shapes& shapes) {
  std::map<std::string, std::vector<int64_t>> sorted;
  for (const auto& item : shapes) sorted[item.key()] = item.value();
  std::string text;
  for (const auto& [name, shape] : sorted)
    text += c10::str(text.empty() ? "" : ", ", name, " ", at::IntArrayRef(shape));
  return text.empty() ? "nothing" : text;
}

nn::AdaptableLayer::Shapes shapes_of(const Tensors& tensors) {
  nn::AdaptableLayer::Shapes shapes;
  for (const auto& item : tensors) shapes.insert(item.key(), item.value().sizes().vec());
  return shapes;
}

// Returns the name of the layer that has a weight: "up_proj" for "up_proj.weight".
std::string owner_of(const std::string& weight) { return weight.substr(0, weight.rfind('.')); }

// Returns the names in modules_to_save, without the heads of the file's task that the module lacks.
std::vector<std::string> saved_names(const torch::nn::Module& module, const FileConfig& config) {
  std::vector<std::string> names = config.modules_to_save;
  std::erase_if(names, [&](const std::string& name) {
    if (std::find(config.heads.begin(), config.heads.end(), name) == config.heads.end()) return false;
    const auto known = modules(module);
    return std::none_of(known.begin(), known.end(), [&](const auto& m) { return matches(m.first, {name}); });
  });
  return names;
}

class Sorter {
 public:
  Sorter(const torch::nn::Module& module, const SafetensorsFile& file, const FileConfig& config)
      : file_(file), config_(config), where_("lora::load_adapter: " + file.path()) {
    saved_ = saved_modules(where_, module, saved_names(module, config));
    for (const auto& [name, layer] : all_of<nn::AdaptableLayer>(module)) layers_[name] = layer;
    for (const auto& [name, bias] : base_biases(module, "all")) biases_[name] = bias;
    for (const auto& item : module.named_parameters()) {
      if (item.key().ends_with(".weight") && item.value().dim() == 2) weights_[item.key()] = item.value();
    }
    // A layer that was tied to another by assignment computes with another tensor than the registered one.
    for (const auto& [name, layer] : layers_) {
      const Tensor& weight = layer->base_weight();
      if (weight.is_floating_point() && weight.dim() == 2) weights_[name + ".weight"] = weight;
    }
    for (const auto& entry : file.entries()) sort(entry.name);
    for (auto& [name, saved_layer] : content.layers) check_layer(name, saved_layer);
    for (const auto& [name, values] : content.copies) check_copy(module, name, values);
    check_projection();
  }

  Content content;

 private:
  void sort(const std::string& key) {
    TORCH_CHECK_VALUE(is_name(key), where_, ": expected names of tensors, received ", files::quote(key));
    const Tensor value = file_.load(key);
    if (key == std::string(kShared) + "vera_A" || key == std::string(kShared) + "vera_B") {
      content.projection.insert(key.substr(std::string(kShared).size()), value);
      return;
    }
    TORCH_CHECK_VALUE(key.starts_with(kPrefix), where_, ": expected keys that begin with ", kPrefix,
                      ", received ", key);
    const std::string name = key.substr(std::string(kPrefix).size());
    for (const auto& owner : saved_) {
      if (!name.starts_with(owner + ".")) continue;
      content.copies[owner][name.substr(owner.size() + 1)] = value;
      return;
    }
    const std::string plain = base_name(name);
    const auto bias = biases_.find(plain);
    const auto weight = weights_.find(plain);
    if (bias != biases_.end() && has_bias(key)) {
      add_base(key, bias->second, value);
    } else if (weight != weights_.end()) {
      add_base(key, weight->second, value);
    } else if (plain.ends_with(".weight") && layers_.count(owner_of(plain)) > 0) {
      add_quantized(owner_of(plain), key, value);
    } else {
      const auto [layer, parameter] = split_key(name);
      TORCH_CHECK_VALUE(!parameter.empty() && value.is_floating_point(), where_,
                        ": expected floating-point tensors of an adapter, of "
                        "modules_to_save and of biases, received ",
                        key, " of ", value.scalar_type());
      TORCH_CHECK_VALUE(layers_.count(layer) > 0, where_, ": ", layer,
                        ": expected a layer of shoestring::nn in the module, found none "
                        "of that name");
      content.layers[layer].values.insert(parameter, value);
    }
  }

  // Returns the name of the base's weight that a key of the file has, or the key itself. PEFT inserts the
  // name of its wrapper before that of the parameter. A module may have such a name, too.
  std::string base_name(const std::string& key) const {
    const std::string wrapper = ".base_layer", last = key.substr(std::min(key.rfind('.'), key.size()));
    std::string owner = owner_of(key);
    const auto is_known = [&](const std::string& name) {
      return biases_.count(name) > 0 || weights_.count(name) > 0 ||
             (last == ".weight" && layers_.count(owner) > 0);
    };
    while (!is_known(owner + last)) {
      if (!owner.ends_with(wrapper)) return key;
      owner.resize(owner.size() - wrapper.size());
    }
    return owner + last;
  }

  // Returns whether the file may hold this bias of the base: if the option `bias` trains biases, or beside
  // the weight of its layer.
  bool has_bias(const std::string& key) const {
    return config_.bias != "none" || file_.contains(owner_of(key) + ".weight");
  }

  // PEFT writes the weights and biases of embeddings and output layers into the file if the vocabulary was
  // resized or if they have an adapter.
  void add_base(const std::string& key, const Tensor& tensor, const Tensor& value) {
    TORCH_CHECK_VALUE(
        tensor.sizes() == value.sizes() && value.is_floating_point(), where_, ": ", key, ": expected shape ",
        tensor.sizes(), ", received ", value.sizes(), " of ", value.scalar_type(),
        tensor.dim() == 2 ? ". Resize the vocabulary of the module to that of the file first" : "");
    for (const auto& [other, given] : content.base) {
      TORCH_CHECK_VALUE(!other.is_same(tensor) || at::equal(given, value), where_, ": ", key,
                        ": expected the values of the layer to which it is tied, received others. Untie the "
                        "two in the module first");
    }
    content.base.emplace_back(tensor, value);
  }

  void add_quantized(const std::string& name, const std::string& key, const Tensor& value) {
    const auto layer = layers_.find(name);
    auto* linear = layer == layers_.end() ? nullptr : dynamic_cast<nn::AdaptableLinearImpl*>(layer->second);
    TORCH_CHECK_VALUE(
        linear != nullptr && value.is_floating_point() &&
            value.sizes() == at::IntArrayRef({linear->options.out_features(), linear->options.in_features()}),
        where_, ": ", key, ": expected the shape of a weight of the module, received ", value.sizes());
    content.quantized.emplace_back(linear, value);
  }

  void check_layer(const std::string& name, Content::Layer& saved_layer) const {
    int64_t rank = 1;
    for (const char* down : {"lora_A", "lora_embedding_A"}) {
      const Tensor* A = saved_layer.values.find(down);
      if (A != nullptr && A->dim() >= 2) rank = std::max<int64_t>(A->size(0), 1);
    }
    saved_layer.layer = layers_.at(name);
    saved_layer.options = config_.layer_options(name, rank);
    check_adapter(where_, saved_layer.options);
    check_changed_base(name, saved_layer);
    const std::string expected = listed_shapes(saved_layer.layer->shapes(saved_layer.options, where_, name));
    const std::string received = listed_shapes(shapes_of(saved_layer.values));
    TORCH_CHECK_VALUE(expected == received, where_, ": ", name, ": expected ", expected, ", received ",
                      received);
  }

  // An initialisation that changed the base is computed again from the original weight.
  void check_changed_base(const std::string& name, const Content::Layer& saved_layer) const {
    const auto* lora = std::get_if<nn::LoraOptions>(&saved_layer.options);
    if (lora == nullptr || !lora->changes_base()) return;
    const auto* linear = dynamic_cast<const nn::AdaptableLinearImpl*>(saved_layer.layer);
    TORCH_CHECK_VALUE(
        linear != nullptr && !linear->is_quantized(), where_, ": ", name,
        ": expected a linear layer with a dense weight for init_lora_weights '", lora->init(),
        "', received another. Load the adapter onto the dense model, save it, and load that file");
    for (const auto& item : saved_layer.layer->adapters) {
      const auto* other_lora = std::get_if<nn::LoraOptions>(&item.value()->options);
      TORCH_CHECK_VALUE(other_lora == nullptr || !other_lora->dora(), where_, ": ", name,
                        ": expected a layer without DoRA for init_lora_weights '", lora->init(),
                        "', received one with the DoRA adapter '", item.key(), "'");
    }
  }

  void check_copy(const torch::nn::Module& module, const std::string& name,
                  const std::map<std::string, Tensor>& values) const {
    std::map<std::string, Tensor> of_module;
    for (const auto& [module_name, owner] : modules(module)) {
      if (module_name == name) of_module = TrainedCopyImpl(*owner).owner_tensors();
    }
    bool same = of_module.size() == values.size();
    for (const auto& [key, value] : values) same = same && of_module.count(key) > 0;
    for (const auto& [key, value] : values) same = same && of_module[key].sizes() == value.sizes();
    TORCH_CHECK_VALUE(same, where_, ": ", name,
                      ": expected the names and shapes of its parameters and buffers, received others");
  }

  void check_projection() {
    const auto* vera = std::get_if<nn::VeraOptions>(&config_.options);
    int64_t in = 0, out = 0;
    for (const auto& [name, own] : content.layers) {
      const auto* linear = dynamic_cast<const nn::AdaptableLinearImpl*>(own.layer);
      if (linear == nullptr) continue;
      in = std::max(in, linear->options.in_features());
      out = std::max(out, linear->options.out_features());
    }
    if (vera == nullptr || (content.projection.is_empty() && !vera->save_projection())) {
      TORCH_CHECK_VALUE(content.projection.is_empty() || vera != nullptr, where_,
                        ": expected vera_A and vera_B only with peft_type VERA; save the adapter again");
      if (vera != nullptr) content.projection = projection(*vera, in, out);
      return;
    }
    const Tensor *A = content.projection.find("vera_A"), *B = content.projection.find("vera_B");
    const bool fit = A != nullptr && B != nullptr && A->dim() == 2 && B->dim() == 2 &&
                     A->size(0) == vera->rank() && A->size(1) >= in && B->size(0) >= out &&
                     B->size(1) == vera->rank();
    TORCH_CHECK_VALUE(fit, where_, ": expected base_model.vera_A [", vera->rank(), ", ", in,
                      "] and base_model.vera_B [", out, ", ", vera->rank(), "], or larger, received ",
                      listed_shapes(shapes_of(content.projection)));
  }

  const SafetensorsFile& file_;
  const FileConfig& config_;
  const std::string where_;
  std::vector<std::string> saved_;
  std::map<std::string, nn::AdaptableLayer*> layers_;
  std::map<std::string, Tensor> biases_;
  std::map<std::string, Tensor> weights_;  // dense matrices of the module, by name
};

}  // namespace

void check_digest(const SafetensorsFile& file, const std::string& digest) {
  const std::string folder = file.path().substr(0, file.path().size() - std::string(kWeights).size());
  // adapter files written by PEFT have no digest of their configuration
  const auto saved = file.metadata().find(kDigest);
  TORCH_CHECK_VALUE(saved == file.metadata().end() || saved->second == digest,
                    "lora::load_adapter: ", file.path(), ": expected the weights that were saved with ",
                    folder, kConfig,
                    ", received weights of another save, "
                    "which was interrupted, or a changed configuration; save the adapter again");
}

void load_adapter(torch::nn::Module& module, const std::string& directory, const std::string& adapter_name,
                  bool any_base) {
  check_name("lora::load_adapter", adapter_name);
  const std::string inner = directory + "/" + adapter_name;
  const bool named = adapter_name != "default" && ::access((inner + "/" + kConfig).c_str(), F_OK) == 0;
  const std::string folder = named ? inner : directory;
  const FileConfig config = read_config(folder + "/" + kConfig);
  const SafetensorsFile file(folder + "/" + kWeights);
  check_digest(file, config.digest);
  if (!any_base) check_base_record(module, file);
  Content content = Sorter(module, file, config).content;
  TORCH_CHECK_VALUE(!content.layers.empty(), "lora::load_adapter: ", file.path(),
                    ": expected tensors of an adapter, received none");
  for (const auto& [name, layer] : adapted_layers(module)) {
    TORCH_CHECK_VALUE(!layer->has_adapter(adapter_name) || content.layers.count(name) > 0,
                      "lora::load_adapter: ", folder, ": expected values for ", name,
                      ", which has an adapter '", adapter_name, "'; found none");
  }

  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.requires_grad_(false);
  for (auto& item : content.projection)
    item.value() = item.value().to(content.layers.begin()->second.layer->adapter_type());
  // The adapter in the file was trained with the original base weight. The layer may already have an adapter
  // of this name that subtracted its initial product from the base weight. Deleting that adapter restores the
  // base weight.
  for (auto& [name, own] : content.layers) {
    if (own.layer->has_adapter(adapter_name) && own.layer->adapters[adapter_name]->has("initial_A"))
      own.layer->delete_adapter(adapter_name);
  }
  for (auto& [parameter, value] : content.base) parameter.copy_(value);
  for (auto& [linear, value] : content.quantized) linear->set_weight(value.to(at::kFloat));
  for (auto& [name, own] : content.layers) {
    const auto* lora = std::get_if<nn::LoraOptions>(&own.options);
    if (lora != nullptr && lora->changes_base()) {
      if (own.layer->has_adapter(adapter_name)) own.layer->delete_adapter(adapter_name);
      auto& linear = dynamic_cast<nn::AdaptableLinearImpl&>(*own.layer);
      own.layer->add_adapter(own.options, adapter_name, take_out(linear, *lora, nullptr, false));
    }
    own.layer->put_adapter(adapter_name, own.options, own.values);
    own.layer->adapters[adapter_name]->bias = config.bias;
    for (const auto& item : content.projection)
      own.layer->adapters[adapter_name]->set_fixed(item.key(), item.value());
  }
  for (const auto& [name, values] : content.copies) {
    auto copy = add_copy(module, name, adapter_name).values(adapter_name);
    for (const auto& [key, value] : values) copy[key].copy_(value);
  }
  set_adapter(module, {adapter_name});
}

}  // namespace shoestring::lora
