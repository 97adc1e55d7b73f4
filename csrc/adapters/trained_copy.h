#pragma once

#include <map>
#include <string>
#include <vector>

#include <c10/core/TensorImpl.h>
#include <torch/nn/module.h>

namespace shoestring::lora {

/// By adapter, the copies of a module that are trained whole, beside its frozen original (PEFT's
/// modules_to_save). A LibTorch module is called through holders that nothing can be put in front of: its own
/// tensors hold the values in use, and this child of it those that are not. So a copy's forward and backward
/// go together, under the same adapter; where they do not, autograd finds the tensors changed and raises.
class TrainedCopyImpl : public torch::nn::Module {
 public:
  static constexpr const char* kName = "modules_to_save";

  explicit TrainedCopyImpl(torch::nn::Module& owner);

  bool has(const std::string& adapter_name) const;
  void add(const std::string& adapter_name);
  void remove(const std::string& adapter_name);
  /// Takes itself off its owner, which stays as it is.
  void detach();
  /// The copy in use becomes the module, or the reverse.
  void set_merged(bool merged);
  /// Puts the values of the active adapter's copy, or the original's, into the owner.
  void use(const std::vector<std::string>& active, bool enabled);
  /// A copy's tensors by their names in the owner.
  std::map<std::string, at::Tensor> values(const std::string& adapter_name) const;
  /// The owner's tensors by name.
  std::map<std::string, at::Tensor> own() const;

  std::vector<std::string> adapters, active;
  bool enabled = true;
  bool merged = false;

 private:
  void hold(const std::string& adapter_name, const std::string& tensor, const at::Tensor& value);
  void put(const std::string& adapter_name);

  torch::nn::Module* owner_;  // which owns this
  std::string in_use_;        // the copy in the owner's tensors; empty: the original
  std::map<std::string, c10::VariableVersion> versions_;  // of each held tensor
  uint32_t count_ = 0;
};

/// The copies in a module, by the owner's name.
std::vector<std::pair<std::string, TrainedCopyImpl*>> trained_copies(const torch::nn::Module& module);

/// True for what is inside one of these modules, or is one.
bool is_inside(const std::string& name, const std::vector<std::string>& modules);

/// The modules that these names mean; raises ValueError for a name that no module has, and for modules with
/// adapters or quantised weights in them.
std::vector<std::string> saved_modules(const std::string& caller, const torch::nn::Module& module,
                                       const std::vector<std::string>& names);

/// Adds a copy of the module of that name for an adapter.
TrainedCopyImpl& add_copy(torch::nn::Module& module, const std::string& name,
                          const std::string& adapter_name);

}  // namespace shoestring::lora
