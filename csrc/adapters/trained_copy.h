#pragma once

#include <map>
#include <string>
#include <vector>

#include <c10/core/TensorImpl.h>
#include <torch/nn/module.h>

namespace shoestring::lora {

/// Holds the fully trained copies of a module, one per adapter, and the frozen original values (PEFT's
/// modules_to_save).
///
/// LibTorch offers no way to intercept calls of a module. Therefore the module's own tensors hold the values
/// of the copy in use, and this child module holds the other copies. Forward and backward must run with the
/// same active adapter; otherwise autograd raises, because it finds that the tensors were changed.
class TrainedCopyImpl : public torch::nn::Module {
 public:
  static constexpr const char* kName = "modules_to_save";

  explicit TrainedCopyImpl(torch::nn::Module& owner);

  bool has(const std::string& adapter_name) const;
  void add(const std::string& adapter_name);
  void remove(const std::string& adapter_name);
  /// Unregisters this object from its owner, the module whose copies it holds. The owner keeps the values of
  /// the copy in use.
  void detach();
  /// If `merged` is true, merges the copy in use: the owning module keeps the values of the copy, frozen. If
  /// `merged` is false, undoes the merge.
  void set_merged(bool merged);
  /// Writes the values of the first active adapter that has a copy into the owning module's tensors. Writes
  /// the original values if no active adapter has a copy or `enabled` is false.
  void use(const std::vector<std::string>& active, bool enabled);
  /// Returns the tensors of an adapter's copy, by the names that they have in the owning module.
  std::map<std::string, at::Tensor> values(const std::string& adapter_name) const;
  /// Returns the parameters and buffers of the owning module, by name.
  std::map<std::string, at::Tensor> owner_tensors() const;

  std::vector<std::string> adapters, active;
  bool enabled = true;
  bool merged = false;

 private:
  void hold(const std::string& adapter_name, const std::string& tensor, const at::Tensor& value);
  void put(const std::string& adapter_name);

  torch::nn::Module* owner_;  // the module whose copies this object holds
  // Name of the adapter whose copy is in the owning module's tensors. Empty if they hold the original values.
  std::string in_use_;
  // autograd version counter of each tensor of each copy
  std::map<std::string, c10::VariableVersion> versions_;
  uint32_t count_ = 0;
};

/// Returns the TrainedCopyImpl of each submodule that has one, with the submodule's name.
std::vector<std::pair<std::string, TrainedCopyImpl*>> trained_copies(const torch::nn::Module& module);

/// Returns whether `name` is in `modules`, or names a submodule of a module in the list.
bool is_inside(const std::string& name, const std::vector<std::string>& modules);

/// Returns whether a parameter of the module `name`, or of a module inside of it, is also that of another
/// module, as in an output layer that is tied to the embedding.
bool shares_parameter(const torch::nn::Module& module, const std::string& name);

/// Returns the names of the modules that `names` select. Raises ValueError for a name that matches no module,
/// and for a selected module with adapters, quantised weights, or a parameter that another module has as
/// well.
std::vector<std::string> saved_modules(const std::string& caller, const torch::nn::Module& module,
                                       const std::vector<std::string>& names);

/// Adds a trained copy of the module `name` for an adapter, unless the adapter already has one. Returns the
/// object that holds the module's copies.
TrainedCopyImpl& add_copy(torch::nn::Module& module, const std::string& name,
                          const std::string& adapter_name);

}  // namespace shoestring::lora
