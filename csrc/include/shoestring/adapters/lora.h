#pragma once

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <shoestring/adapters/adaptable_linear.h>
#include <shoestring/adapters/conv.h>
#include <shoestring/adapters/embedding.h>
#include <shoestring/core/export.h>

namespace shoestring::lora {

using nn::IA3Options;
using nn::LoraOptions;
using nn::VeraOptions;

struct ApplyOptions {
  /// Kind and options of the adapter: LoraOptions, IA3Options or VeraOptions.
  TORCH_ARG(nn::AnyAdapterOptions, adapter) = LoraOptions();
  /// Name of the new adapter. After apply it is the only adapter in use; set_adapter selects other adapters.
  TORCH_ARG(std::string, adapter_name) = "default";
  /// Layers that get an adapter: full names, or name endings that start after a dot (PEFT's rule). An empty
  /// list selects every shoestring::nn::AdaptableLinear.
  TORCH_ARG(std::vector<std::string>, target_modules) = {};
  /// Layers that get no adapter, by the same rule.
  TORCH_ARG(std::vector<std::string>, exclude_modules) = {};
  /// Numbers of the layers of a transformer whose modules get an adapter; an empty list selects all. The
  /// number is the first one in a module's name that follows two other parts, such as 3 in
  /// "model.layers.3.mlp". A module whose whole name is in target_modules gets an adapter in any layer.
  /// target_modules must not be empty.
  TORCH_ARG(std::vector<int64_t>, layers_to_transform) = {};
  /// Regular expressions for the part of a module's name before the layer number, such as "layers". They
  /// replace the rule that two parts precede the number. layers_to_transform must not be empty.
  TORCH_ARG(std::vector<std::string>, layers_pattern) = {};
  /// Names of modules of any class that are trained in full. apply makes a trained copy of each one. These
  /// modules get no adapter and stay dense. Setting an adapter puts its copy into the module's own tensors.
  /// Forward and backward must therefore run with the same adapter in use.
  TORCH_ARG(std::vector<std::string>, modules_to_save) = {};
  /// The biases that are trained: "none", "all" (every bias of the module) or "lora_only" (biases of the
  /// adapted layers; "vera_only" for VeRA). The biases are trained in place and no original is kept.
  /// Disabling the adapter does not restore them.
  TORCH_ARG(std::string, bias) = "none";
  /// Quantisation format: "none", "nf4", "fp4", "int4" or "int8". apply quantises the weight of every
  /// shoestring::nn::AdaptableLinear to this format, with or without an adapter.
  TORCH_ARG(std::string, quantize) = "none";
  /// For 4-bit weights: the number of elements that share a scale (block_size), and whether the scales of nf4
  /// and fp4 are quantised to 8 bits, too (double_quant).
  TORCH_ARG(int64_t, block_size) = 64;
  TORCH_ARG(bool, double_quant) = false;
};

/// Freezes the module's parameters and adds trainable adapters to its shoestring::nn layers, in place. A
/// second call adds another adapter. Declare a layer that must stay unchanged, such as an output head, as
/// torch::nn::Linear. Returns the names of the layers that got the adapter. With the same seed, the initial
/// values equal those of Python's shoestring.lora and of PEFT.
SHOESTRING_API std::vector<std::string> apply(torch::nn::Module& module, const ApplyOptions& options = {});

struct EvaOptions {
  /// Name of a LoRA adapter that is not trained yet: its lora_B is zero.
  TORCH_ARG(std::string, adapter_name) = "default";
  /// A layer gets at most rho times its rank; 1 leaves all ranks unchanged.
  TORCH_ARG(double, rho) = 2;
};

/// Takes a mask (...), bool, over the leading dimensions of the layers' inputs, such as (batch, tokens). From
/// then on only the chosen rows are read. An undefined tensor chooses all rows.
using ChooseRows = std::function<void(const at::Tensor& mask)>;

/// Initialises lora_A of the adapter in every AdaptableLinear with the principal directions of the layer's
/// inputs (EVA, arXiv 2410.07170). `run` runs the module on some batches. It is called once, in evaluation
/// mode and without gradients, and may choose rows before each batch.
///
/// Ranks are redistributed to the layers whose principal directions explain the largest fractions of
/// variance. The sum of the ranks and the scaling of each layer do not change. A layer that gets the rank 0
/// loses the adapter. A layer whose rank changes gets new parameters, so create the optimizer after this
/// call. Returns the new rank of each layer.
///
///     lora::apply(*model, lora::ApplyOptions().adapter(nn::LoraOptions().rank(8)));
///     lora::initialize_eva(*model, [&](const lora::ChooseRows&) {
///       for (const auto& batch : batches) model->forward(batch);
///     });
///
/// Raises ValueError if no layer has such an adapter, if an adapter is trained already, or if the inputs have
/// too few rows.
SHOESTRING_API std::map<std::string, int64_t> initialize_eva(
    torch::nn::Module& module, const std::function<void(const ChooseRows&)>& run,
    const EvaOptions& options = {});

// ---- Several adapters

/// Returns the names of the module's adapters.
SHOESTRING_API std::vector<std::string> adapter_names(const torch::nn::Module& module);
/// Makes the named adapters the ones in use. If there are several, each layer adds up their contributions.
/// Only the adapters in use require gradients.
SHOESTRING_API void set_adapter(torch::nn::Module& module, const std::vector<std::string>& adapter_names);
/// Removes an adapter. If its initialisation moved a part of the base weight into the adapter, that part is
/// added back to the weight. The other adapters in use stay in use. If the removed adapter was the only one
/// in use, the module runs without adapters until the next set_adapter.
SHOESTRING_API void delete_adapter(torch::nn::Module& module, const std::string& adapter_name);

/// Disables all adapters of the module while the guard exists. Trained biases keep their trained values. The
/// module must outlive the guard.
class SHOESTRING_API DisableAdapterGuard {
 public:
  explicit DisableAdapterGuard(torch::nn::Module& module);
  ~DisableAdapterGuard();
  DisableAdapterGuard(const DisableAdapterGuard&) = delete;
  DisableAdapterGuard& operator=(const DisableAdapterGuard&) = delete;

 private:
  std::vector<std::function<void()>> restore_;
};

/// Assigns an adapter to each row of the batch while the guard exists. A row is an index in the first
/// dimension of the layer's input. A row with std::nullopt uses no adapter. If layers are recomputed in
/// backward, backward must also run while the guard exists.
class SHOESTRING_API AdaptersPerRowGuard {
 public:
  AdaptersPerRowGuard(torch::nn::Module& module,
                      const std::vector<std::optional<std::string>>& adapter_names);
  ~AdaptersPerRowGuard();
  AdaptersPerRowGuard(const AdaptersPerRowGuard&) = delete;
  AdaptersPerRowGuard& operator=(const AdaptersPerRowGuard&) = delete;

 private:
  std::vector<nn::AdaptableLayer*> layers_;
};

// ---- Training

struct LoraPlusOptions {
  /// Learning rate of lora_B and of all vectors, divided by the learning rate of lora_A. At least 1.
  TORCH_ARG(double, lr_ratio) = 16;
  /// Learning rate of embeddings and of the adapters on embeddings.
  TORCH_ARG(double, embedding_lr) = 1e-6;
};

/// Parameters that share a learning rate. weight_decay is false for vectors.
struct ParameterGroup {
  std::vector<at::Tensor> params;
  double lr;
  bool weight_decay;
};

/// Groups the parameters that require a gradient by learning rate, as in LoRA+ (arXiv 2402.12354). `lr` is
/// the rate of lora_A and of other matrices. Raises ValueError if lr_ratio is below 1 or if the module has no
/// trainable parameter.
SHOESTRING_API std::vector<ParameterGroup> loraplus_param_groups(const torch::nn::Module& module, double lr,
                                                                 const LoraPlusOptions& options = {});

/// Groups the parameters that require a gradient as in LoRA+, into parameter groups for an optimizer of
/// LibTorch or of shoestring. Each group copies `defaults` and sets its own lr. Groups of vectors set
/// weight_decay to 0.
///
///     shoestring::optim::AdamWOptions defaults(2e-4);
///     shoestring::optim::AdamW optimizer(shoestring::lora::loraplus_param_groups(*model, defaults),
///     defaults);
template <std::derived_from<torch::optim::OptimizerOptions> Options>
std::vector<torch::optim::OptimizerParamGroup> loraplus_param_groups(const torch::nn::Module& module,
                                                                     const Options& defaults,
                                                                     const LoraPlusOptions& options = {}) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (auto& group : loraplus_param_groups(module, defaults.lr(), options)) {
    auto group_options = std::make_unique<Options>(defaults);
    group_options->lr(group.lr);
    if (!group.weight_decay) group_options->weight_decay(0);
    groups.emplace_back(std::move(group.params), std::move(group_options));
  }
  return groups;
}

// ---- Merging

using MergeOptions = nn::MergeOptions;

/// The rounding errors of merging adapters into weights. An error is norm(merged weight - exact weight) /
/// norm(change of the weight by the adapters).
struct MergeReport {
  std::map<std::string, double> layers;  ///< rounding error of each layer, by the layer's name
  double error = 0;  ///< rounding error of all layers together; 0 if no adapter changed a weight
};

/// Adds the adapters to the weights of their layers and removes all adapters from the layers. A merged weight
/// has the 16- or 32-bit dtype of the base weight and is rounded once.
SHOESTRING_API MergeReport merge(torch::nn::Module& module, const MergeOptions& options = {});
/// Undoes merge: restores the exact bytes of every weight and all adapters.
SHOESTRING_API void unmerge(torch::nn::Module& module);

// ---- Files

/// Writes adapter_config.json and adapter_model.safetensors in PEFT's format. The adapter "default" goes into
/// `directory`; any other adapter goes into a subdirectory of its name. An empty `adapter_names` saves all
/// adapters. The files name the layers as they are named within `module`, so pass the whole model.
///
/// An adapter that changed the base weights ("pissa", "olora", "loftq") is written as its change to the
/// original base weights, with twice the rank. The file therefore loads onto the original weights. With
/// quantised base weights, the file does not contain the rounding error of quantising the changed weights.
///
/// Each file replaces the previous one only after it is on disk. The weights file stores a digest of the
/// configuration file. By this digest, load_adapter refuses two files from different saves, which a crash can
/// leave behind.
SHOESTRING_API void save_adapter(const torch::nn::Module& module, const std::string& directory,
                                 const std::vector<std::string>& adapter_names = {});

/// Loads an adapter written by PEFT or by save_adapter (C++ or Python) and makes it the one in use. The
/// module does not need to have adapters before. load_adapter changes the module only if everything in the
/// file fits.
///
/// save_adapter describes weights of the base model in the file. A module with other weights is refused,
/// unless `any_base` is true. Values may differ by a rounding to bf16, and quantised weights are not
/// compared.
///
/// A PEFT adapter with "pissa" or "olora" that was not converted changes the base weights again, as in
/// PEFT. Weights of embeddings and output layers in the file replace those of the module.
SHOESTRING_API void load_adapter(torch::nn::Module& module, const std::string& directory,
                                 const std::string& adapter_name = "default", bool any_base = false);

}  // namespace shoestring::lora
