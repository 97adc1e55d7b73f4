#pragma once

#include <map>
#include <string>
#include <vector>

#include <c10/core/TensorImpl.h>
#include <torch/nn/module.h>

namespace shoestring::lora {

/// Holds the fully trained copies of a module, one per adapter, and its frozen original (PEFT's
/// modules_to_save). A LibTorch module is called through its holders, and nothing can be put in front of
/// them. Therefore the module's own tensors hold the values in use, and this child module holds the values
/// that are not in use. Forward and backward of a copy must run under the same adapter; otherwise autograd
/// finds the tensors changed and raises.
class TrainedCopyImpl : public torch::nn::Module {
 public:
  static constexpr const char* kName = "modules_to_save";

  explicit TrainedCopyImpl(torch::nn::Module& owner);

  bool has(const std::string& adapter_name) const;
  void add(const std::string& adapter_name);
  void remove(const std::string& adapter_name);
  /// Removes this child module from its owner. The owner keeps its current values.
  void detach();
  /// With true, the copy in use becomes the module itself and is frozen. With false, this is undone.
  void set_merged(bool merged);
  /// Puts the values of the active adapter's copy, or of the original, into the owner's tensors.
  void use(const std::vector<std::string>& active, bool enabled);
  /// Returns the tensors of an adapter's copy, by their names in the owner.
  std::map<std::string, at::Tensor> values(const std::string& adapter_name) const;
  /// Returns the owner's tensors by name.
  std::map<std::string, at::Tensor> own() const;

  std::vector<std::string> adapters, active;
  bool enabled = true;
  bool merged = false;

 private:
  void hold(const std::string& adapter_name, const std::string& tensor, const at::Tensor& value);
  void put(const std::string& adapter_name);

  torch::nn::Module* owner_;  // the module that owns this child module
  std::string in_use_;        // adapter whose copy is in the owner's tensors; empty for the original
  std::map<std::string, c10::VariableVersion> versions_;  // version counter of each held tensor
  uint32_t count_ = 0;
};

/// Returns the copies in a module, by the name of their owner.
std::vector<std::pair<std::string, TrainedCopyImpl*>> trained_copies(const torch::nn::Module& module);

/// Returns whether `name` is one of these modules or is inside one.
bool is_inside(const std::string& name, const std::vector<std::string>& modules);

/// Returns the modules that these names select. Raises ValueError for a name that matches no module, and for
/// modules that contain adapters or quantised weights.
std::vector<std::string> saved_modules(const std::string& caller, const torch::nn::Module& module,
                                       const std::vector<std::string>& names);

/// Adds a copy of the named module for an adapter, unless it has one. Returns the holder of the module's
/// copies.
TrainedCopyImpl& add_copy(torch::nn::Module& module, const std::string& name,
                          const std::string& adapter_name);

}  // namespace shoestring::lora
