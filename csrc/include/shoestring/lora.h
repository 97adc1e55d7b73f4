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

#include <shoestring/export.h>
#include <shoestring/nn/embedding.h>
#include <shoestring/nn/linear.h>

namespace shoestring::lora {

struct LoraOptions {
  /// nn::AdapterOptions, IA3Options or VeraOptions.
  TORCH_ARG(nn::AnyAdapterOptions, adapter) = nn::AdapterOptions();
  /// The new adapter is the one in use, alone; set_adapter changes that.
  TORCH_ARG(std::string, adapter_name) = "default";
  /// Names of layers, or what names end with after a dot (PEFT's rule). Empty: every shoestring::nn::Linear.
  TORCH_ARG(std::vector<std::string>, target_modules) = {};
  /// Names of modules, of any class, of which a copy is trained whole; they get no adapter and stay dense.
  /// Such a module's own tensors hold the copy in use: forward and backward have to run under the same
  /// adapter.
  TORCH_ARG(std::vector<std::string>, modules_to_save) = {};
  /// "none"; "all" or "lora_only" ("vera_only" of VeRA) to train the biases of the module, or of the adapted
  /// layers, themselves: these are not kept aside, so that disabling the adapter leaves them as trained.
  TORCH_ARG(std::string, bias) = "none";
  /// "none", "nf4", "fp4", "int4" or "int8": every shoestring::nn::Linear, with an adapter or without, gets
  /// such a weight.
  TORCH_ARG(std::string, quantize) = "none";
  /// Of 4-bit weights.
  TORCH_ARG(int64_t, block_size) = 64;
  TORCH_ARG(bool, nested) = false;
};

/// Freezes a module's parameters and gives its shoestring::nn layers trainable adapters, in place; a second
/// call adds another adapter. Declare what shall stay as it is, such as an output head, as torch::nn::Linear.
/// Returns the names of the layers with the adapter. A seed gives the values that Python's shoestring.lora
/// and PEFT begin with.
SHOESTRING_API std::vector<std::string> apply(torch::nn::Module& module, const LoraOptions& options = {});

// ---- Several adapters

/// The names of the module's adapters.
SHOESTRING_API std::vector<std::string> adapter_names(const torch::nn::Module& module);
/// Uses the named adapter, or the sum of several, from now on; they alone require gradients.
SHOESTRING_API void set_adapter(torch::nn::Module& module, const std::vector<std::string>& adapter_names);
/// Takes an adapter off, and its part back into the base where its initialisation took that out. The others
/// stay in use; where it was the only one in use the module is its base, until set_adapter.
SHOESTRING_API void delete_adapter(torch::nn::Module& module, const std::string& adapter_name);

/// While it lives, the module, which must outlive it, is its base alone. Biases that were trained stay as
/// trained.
class SHOESTRING_API DisableAdapterGuard {
 public:
  explicit DisableAdapterGuard(torch::nn::Module& module);
  ~DisableAdapterGuard();
  DisableAdapterGuard(const DisableAdapterGuard&) = delete;
  DisableAdapterGuard& operator=(const DisableAdapterGuard&) = delete;

 private:
  std::vector<std::function<void()>> restore_;
};

/// While it lives, each row of the batch (the first dimension of what reaches the layers) has its own
/// adapter, by name, or none. Backward has to run within it where layers are recomputed.
class SHOESTRING_API AdaptersPerRowGuard {
 public:
  AdaptersPerRowGuard(torch::nn::Module& module,
                      const std::vector<std::optional<std::string>>& adapter_names);
  ~AdaptersPerRowGuard();
  AdaptersPerRowGuard(const AdaptersPerRowGuard&) = delete;
  AdaptersPerRowGuard& operator=(const AdaptersPerRowGuard&) = delete;

 private:
  std::vector<nn::AdaptedLayer*> layers_;
};

// ---- Training

struct GroupOptions {
  /// How much faster than lora_A lora_B and all vectors learn; at least 1.
  TORCH_ARG(double, lr_ratio) = 16;
  /// Of adapters on embeddings, and of embeddings.
  TORCH_ARG(double, embedding_lr) = 1e-6;
};

/// What one group has in common; vectors have no weight decay.
struct ParameterGroup {
  std::vector<at::Tensor> params;
  double lr;
  bool weight_decay;
};

/// LoRA+ (arXiv 2402.12354): the parameters that require a gradient, by learning rate; lr is that of lora_A
/// and of other matrices. Raises ValueError for an lr_ratio below 1 and for a module in which nothing is
/// trained.
SHOESTRING_API std::vector<ParameterGroup> parameter_groups(const torch::nn::Module& module, double lr,
                                                            const GroupOptions& options = {});

/// The same as groups of an optimizer, LibTorch's or ours, with these options but for lr and vectors'
/// weight_decay:
///
///     shoestring::optim::AdamWOptions defaults(2e-4);
///     shoestring::optim::AdamW optimizer(shoestring::lora::parameter_groups(*model, defaults), defaults);
template <std::derived_from<torch::optim::OptimizerOptions> Options>
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const torch::nn::Module& module,
                                                                const Options& defaults,
                                                                const GroupOptions& options = {}) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (auto& group : parameter_groups(module, defaults.lr(), options)) {
    auto own = std::make_unique<Options>(defaults);
    own->lr(group.lr);
    if (!group.weight_decay) own->weight_decay(0);
    groups.emplace_back(std::move(group.params), std::move(own));
  }
  return groups;
}

// ---- Merging

using MergeOptions = nn::MergeOptions;

/// What merging lost.
struct MergeReport {
  std::map<std::string, double>
      layers;        // the norm of (new weight - exact weight) over that of what the adapters changed
  double error = 0;  // the same of all layers together; 0 where nothing was changed
};

/// Adds adapters to the weights; all adapters leave their layers. A merged weight has the base's 16- or
/// 32-bit dtype and one rounding of error.
SHOESTRING_API MergeReport merge(torch::nn::Module& module, const MergeOptions& options = {});
/// Undoes merge: every weight has exactly its former bytes, and its adapters again.
SHOESTRING_API void unmerge(torch::nn::Module& module);

// ---- Files

/// Writes adapter_config.json and adapter_model.safetensors, as PEFT does: of "default" into the directory,
/// of others into a folder of their name in it. adapter_names: which; empty is all. The module's names are
/// the model's. An adapter that changed the base ("pissa", "olora", "loftq") is written as what it adds to
/// the base as it was, with twice the rank, so that it loads onto the original; over a quantised base that
/// leaves out what quantising the rest rounded away. Each file replaces a former one once it is on disk; the
/// weights hold a digest of their configuration, so that load_adapter refuses two files of different saves,
/// which a crash can leave.
SHOESTRING_API void save_adapter(const torch::nn::Module& module, const std::string& directory,
                                 const std::vector<std::string>& adapter_names = {});

/// Puts an adapter from PEFT, or from save_adapter of either language, onto a module, also one without
/// adapters, and uses it. Nothing is changed unless all of the file fits.
SHOESTRING_API void load_adapter(torch::nn::Module& module, const std::string& directory,
                                 const std::string& adapter_name = "default");

}  // namespace shoestring::lora
