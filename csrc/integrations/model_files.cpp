#include <dirent.h>
#include <fnmatch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include <ATen/Functions.h>

#include <shoestring/adapters/lora.h>
#include <shoestring/integrations/model_files.h>
#include <shoestring/nn.h>

#include "adapters/names.h"
#include "adapters/trained_copy.h"
#include "files/atomic_file.h"
#include "files/safetensors_files.h"
#include "files/safetensors_format.h"
#include "integrations/quantized_keys.h"

namespace shoestring::integrations {
namespace {

using at::Tensor;
using files::quote;
using nn::AdaptableLinearImpl;
using nn::QuantizedLinearImpl;

// A tensor or quantised weight that a module stores in model files, and the name that it has in these files.
struct Slot {
  std::string name;
  Tensor tensor;                          // the dense tensor; undefined for a quantised weight
  AdaptableLinearImpl* linear = nullptr;  // the AdaptableLinear layer that owns the weight, or null
  QuantizedLinearImpl* layer = nullptr;   // the layer that holds the quantised weight, or null

  std::string prefix() const { return name.substr(0, name.size() - std::string("weight").size()); }
  at::Device device() const { return layer != nullptr ? layer->packed.device() : tensor.device(); }
  std::string layer_name() const { return prefix().empty() ? "" : prefix().substr(0, prefix().size() - 1); }
  // Returns the address of the tensor or layer. Two names that share one tensor have the same address.
  const void* identity() const {
    return layer != nullptr ? static_cast<const void*>(layer) : tensor.unsafeGetTensorImpl();
  }
  std::vector<int64_t> shape() const {
    return layer != nullptr
               ? std::vector<int64_t>{layer->options.out_features(), layer->options.in_features()}
               : tensor.sizes().vec();
  }
};

void collect(const torch::nn::Module& module, const std::string& prefix, std::vector<Slot>& slots) {
  if (auto* linear = const_cast<AdaptableLinearImpl*>(module.as<AdaptableLinearImpl>())) {
    slots.push_back(
        {prefix + "weight", linear->weight, linear, linear->is_quantized() ? linear->base.get() : nullptr});
    if (linear->bias.defined()) slots.push_back({prefix + "bias", linear->bias});
  } else if (auto* layer = const_cast<QuantizedLinearImpl*>(module.as<QuantizedLinearImpl>())) {
    slots.push_back({prefix + "weight", Tensor(), nullptr, layer});
    if (layer->bias.defined()) slots.push_back({prefix + "bias", layer->bias});
  } else if (auto* embedding = module.as<nn::AdaptableEmbeddingImpl>()) {
    slots.push_back({prefix + "weight", embedding->weight});
  } else {
    for (const auto& item : module.named_parameters(/*recurse=*/false))
      slots.push_back({prefix + item.key(), item.value()});
    for (const auto& item : module.named_buffers(/*recurse=*/false))
      slots.push_back({prefix + item.key(), item.value()});
    for (const auto& child : module.named_children()) {
      if (child.value()->as<lora::TrainedCopyImpl>() == nullptr)
        collect(*child.value(), prefix + child.key() + ".", slots);
    }
  }
}

// Tells load_model how to load one tensor of the module: it uses a quantised weight from the files, quantises
// a dense weight, or copies the tensor.
struct Step {
  Slot slot;
  std::optional<QuantizedKeys> keys;  // keys of the quantised weight, if the files store the tensor as one
  bool quantize = false;
  // dtype of the loaded tensor, or of the dense weight before quantisation
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;  // device of the loaded tensor
};

class Plan {
 public:
  Plan(const torch::nn::Module& module, const files::SafetensorsFiles& files, const std::string& path,
       const LoadOptions& options)
      : files_(files), options_(options) {
    std::vector<Slot> slots;
    collect(module, "", slots);
    std::map<const void*, std::vector<Slot>> same;
    for (const auto& [name, layer] : lora::adapted_layers(module)) {
      TORCH_CHECK_VALUE(false, "load_model: module: expected a module without adapters, but ", name,
                        " has one");
    }
    for (const Slot& slot : slots) same[slot.identity()].push_back(slot);
    std::vector<Slot> missing;
    for (const Slot& slot : slots) {
      const auto& group = same[slot.identity()];
      if (slot.name == group.front().name && !add(group)) missing.push_back(slot);
    }
    TORCH_CHECK_VALUE(missing.empty(), "load_model: ", path, ": ", quote(missing.front().name),
                      ": expected a tensor of shape ", at::IntArrayRef(missing.front().shape()),
                      ", received none",
                      missing.size() > 1 ? c10::str("; ", missing.size() - 1, " more are missing") : "");
    for (const auto& name : files.names()) {
      TORCH_CHECK_VALUE(taken_.count(name) > 0 || lora::matches(name, options.ignore()),
                        "load_model: ", files.file(name).path(), ": ", quote(name),
                        ": expected a tensor that the module has, received one of shape ",
                        at::IntArrayRef(files.entry(name).shape),
                        " that it does not have; add the name to LoadOptions::ignore");
    }
  }

  // Returns one Step for each tensor to load, in the order of the module.
  const std::vector<Step>& steps() const { return steps_; }

 private:
  // Adds the Step that loads a tensor, which the module may store under several names. Returns false if the
  // files contain none of these names. Raises if they store different values, of which the tensor could keep
  // one alone.
  bool add(const std::vector<Slot>& names) {
    std::optional<Step> added;
    for (const Slot& slot : names) {
      Step step{slot, {}, false, at::kFloat, options_.device().value_or(slot.device())};
      if (slot.linear != nullptr || slot.layer != nullptr) {
        step.keys = find_quantized(files_, slot.prefix(), slot.shape()[0], slot.shape()[1]);
      }
      if (step.keys) {
        TORCH_CHECK_VALUE(slot.linear != nullptr || step.keys->offset || !slot.layer->options.double_quant(),
                          "load_model: ", files_.file(slot.name).path(), ": ", quote(slot.name),
                          ": expected nested scales, as the QuantizedLinear has them, received plain ones");
        step.dtype = step.keys->dtype.value_or(options_.dtype().value_or(at::kFloat));
        taken_.insert(step.keys->names.begin(), step.keys->names.end());
      } else if (files_.contains(slot.name)) {
        check_dense(slot);
        // A weight that the module stores under several names, such as an output layer tied to the embedding,
        // stays dense.
        step.quantize = slot.layer != nullptr ||
                        (slot.linear != nullptr && names.size() == 1 && options_.quantize() != "none" &&
                         !lora::matches(slot.layer_name(), options_.skip()));
        const auto file_dtype = files_.entry(slot.name).dtype;
        step.dtype = at::isFloatingType(file_dtype) ? options_.dtype().value_or(file_dtype) : file_dtype;
        taken_.insert(slot.name);
      } else {
        continue;
      }
      TORCH_CHECK_VALUE(!added || same(*added, step), "load_model: ", files_.file(slot.name).path(), ": ",
                        quote(slot.name), ": expected the values of ", quote(added->slot.name),
                        ", whose tensor the module uses for both, received others. Build the module with a "
                        "tensor for each of the two");
      if (!added) added = step;
    }
    if (added) steps_.push_back(*added);
    return added.has_value();
  }

  // Returns whether the files store the same values under two names.
  bool same(const Step& a, const Step& b) const {
    const auto names = [](const Step& step) {
      return step.keys ? step.keys->names : std::vector<std::string>{step.slot.name};
    };
    const auto first = names(a), second = names(b);
    if (a.keys.has_value() != b.keys.has_value() || first.size() != second.size()) return false;
    for (size_t i = 0; i < first.size(); ++i) {
      Tensor x = files_.file(first[i]).map(first[i]), y = files_.file(second[i]).map(second[i]);
      if (!a.keys) x = x.to(a.dtype), y = y.to(a.dtype);
      if (x.scalar_type() != y.scalar_type() || !at::equal(x, y)) return false;
    }
    return true;
  }

  void check_dense(const Slot& slot) const {
    const auto& entry = files_.entry(slot.name);
    const auto shape = slot.shape();
    const bool floating = slot.layer != nullptr || at::isFloatingType(slot.tensor.scalar_type());
    const bool fits = floating ? entry.dtype == at::kFloat || entry.dtype == at::kBFloat16 ||
                                     entry.dtype == at::kHalf || entry.dtype == at::kDouble
                               : entry.dtype == slot.tensor.scalar_type();
    TORCH_CHECK_VALUE(entry.shape == shape && fits, "load_model: ", files_.file(slot.name).path(), ": ",
                      quote(slot.name), ": expected shape ", at::IntArrayRef(shape), " of ",
                      floating ? "fp32, bf16, fp16 or fp64" : c10::toString(slot.tensor.scalar_type()),
                      ", received ", at::IntArrayRef(entry.shape), " of ", entry.dtype);
  }

  const files::SafetensorsFiles& files_;
  const LoadOptions& options_;
  std::vector<Step> steps_;
  std::set<std::string> taken_;  // names of the tensors in the files that load_model reads
};

void load_quantized(const files::SafetensorsFiles& files, const Step& step) {
  auto parts = read_quantized(files, step.slot.prefix(), *step.keys);
  for (Tensor* part : {&parts.bytes, &parts.scales, &parts.second}) {
    if (part->defined()) *part = part->to(step.device);
  }
  if (step.slot.linear != nullptr) {
    step.slot.linear->set_quantized(parts.bytes, parts.scales, parts.second, step.keys->options, step.dtype);
  } else {
    step.slot.layer->set_parts(parts.bytes, parts.scales, parts.second, step.keys->options);
    step.slot.layer->dtype = step.dtype;
  }
}

void quantize_dense(const files::SafetensorsFiles& files, const Step& step, const Tensor& scratch,
                    const LoadOptions& options) {
  const auto& entry = files.entry(step.slot.name);
  Tensor dense = scratch.narrow(0, 0, entry.end - entry.begin).view(entry.dtype).view(entry.shape);
  files.file(step.slot.name).load_into(step.slot.name, dense);
  dense = dense.to(step.device);
  if (entry.dtype == at::kDouble) dense = dense.to(at::kFloat);
  if (step.slot.layer != nullptr) {
    step.slot.layer->set_weight(dense);
    step.slot.layer->dtype = step.dtype;
    return;
  }
  step.slot.linear->weight.set_data(dense);
  step.slot.linear->quantize(
      QuantizeOptions().quant_type(options.quantize()).block_size(options.block_size()),
      options.double_quant());
  step.slot.linear->base->dtype = step.dtype;
}

void load_dense(const files::SafetensorsFiles& files, const Step& step) {
  const auto& name = step.slot.name;
  Tensor tensor = step.slot.tensor;
  const bool in_place = tensor.is_contiguous() && tensor.device() == step.device &&
                        tensor.scalar_type() == step.dtype && files.entry(name).dtype == step.dtype;
  if (in_place) return files.file(name).load_into(name, tensor);
  tensor.set_data(files.file(name).load(name).to(tensor.options().dtype(step.dtype).device(step.device)));
}

constexpr const char* kShard = "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors";

// Removes the index and the shards of a model that was saved in this folder earlier. The index is removed
// first, because loaders that prefer an index would otherwise read the earlier model.
void remove_shards(const std::string& directory) {
  files::remove_file("save_model", directory + "/model.safetensors.index.json");
  files::sync_folder("save_model", directory);
  std::vector<std::string> shards;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(directory.c_str()), &::closedir);
  while (const dirent* entry = entries ? ::readdir(entries.get()) : nullptr) {
    if (::fnmatch(kShard, entry->d_name, 0) == 0) shards.push_back(directory + "/" + entry->d_name);
  }
  for (const auto& shard : shards) files::remove_file("save_model", shard);
}

}  // namespace

}  // namespace shoestring::integrations

namespace shoestring {

using at::Tensor;

void load_model(torch::nn::Module& module, const std::string& path, const LoadOptions& options) {
  lora::check_quantize("load_model", options.quantize(), options.block_size(), options.double_quant());
  TORCH_CHECK_VALUE(!options.dtype() || at::isFloatingType(*options.dtype()),
                    "load_model: dtype: expected a floating-point type, received ", *options.dtype());
  torch::NoGradGuard no_grad;
  const files::SafetensorsFiles files(path);
  const integrations::Plan plan(module, files, path, options);
  // All dense weights that are quantised while loading use one common buffer. Memory that is freed after each
  // weight would not always be returned to the system.
  int64_t largest = 0;
  for (const integrations::Step& step : plan.steps()) {
    if (step.keys || !step.quantize) continue;
    const auto& entry = files.entry(step.slot.name);
    largest = std::max(largest, entry.end - entry.begin);
  }
  const Tensor scratch = at::empty({largest}, at::kByte);
  for (const integrations::Step& step : plan.steps()) {
    if (step.keys) {
      integrations::load_quantized(files, step);
    } else if (step.quantize) {
      integrations::quantize_dense(files, step, scratch, options);
    } else {
      integrations::load_dense(files, step);
    }
    if (options.loaded()) options.loaded()(step.slot.name);
  }
}

void save_model(const torch::nn::Module& module, const std::string& directory) {
  // Disables adapters and the trained copies that belong to them, so that the base model is saved.
  const lora::DisableAdapterGuard guard(const_cast<torch::nn::Module&>(module));
  std::vector<integrations::Slot> slots;
  integrations::collect(module, "", slots);
  TensorDict tensors;
  std::set<const void*> saved;
  for (const integrations::Slot& slot : slots) {
    if (!saved.insert(slot.identity()).second) continue;
    if (slot.layer != nullptr) {
      integrations::add_quantized(tensors, slot.prefix(), *slot.layer);
    } else {
      tensors.insert(slot.name, slot.tensor);
    }
  }
  files::make_folders("save_model", directory);
  save_safetensors(directory + "/model.safetensors", tensors, {{"format", "pt"}});
  integrations::remove_shards(directory);
}

}  // namespace shoestring
