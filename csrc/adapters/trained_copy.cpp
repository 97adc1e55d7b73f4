#include "adapters/trained_copy.h"

#include <algorithm>
#include <set>

#include <ATen/Functions.h>

#include <shoestring/adapters/adaptable_linear.h>
#include <shoestring/quantization/quantized_linear.h>

#include "adapters/names.h"

namespace shoestring::lora {
namespace {

using at::Tensor;

// Returns the name under which TrainedCopyImpl registers a tensor of a copy that is not in use; parameter
// names must not contain dots. An empty adapter_name means the original module.
std::string key(const std::string& adapter_name, std::string tensor) {
  std::replace(tensor.begin(), tensor.end(), '.', '/');
  return adapter_name + "/" + tensor;
}

bool is_ours(const std::string& name) { return name.starts_with(std::string(TrainedCopyImpl::kName) + "."); }

}  // namespace

TrainedCopyImpl::TrainedCopyImpl(torch::nn::Module& owner) : owner_(&owner) {
  for (const auto& [name, tensor] : owner_tensors()) hold("", name, at::empty({0}, tensor.options()));
}

std::map<std::string, Tensor> TrainedCopyImpl::owner_tensors() const {
  std::map<std::string, Tensor> tensors;
  for (const auto& item : owner_->named_parameters()) tensors.emplace(item.key(), item.value());
  for (const auto& item : owner_->named_buffers()) tensors.emplace(item.key(), item.value());
  std::erase_if(tensors, [](const auto& item) { return is_ours(item.first); });
  return tensors;
}

// Registers a tensor of a copy that is not in use as a frozen parameter, because LibTorch cannot unregister a
// buffer. The version counters of different copies start at different numbers, so autograd notices when one
// copy replaces another.
void TrainedCopyImpl::hold(const std::string& adapter_name, const std::string& tensor, const Tensor& value) {
  register_parameter(key(adapter_name, tensor), value.detach(), /*requires_grad=*/false);
  if (!adapter_name.empty()) versions_[key(adapter_name, tensor)] = c10::VariableVersion(++count_ << 20);
}

std::map<std::string, Tensor> TrainedCopyImpl::values(const std::string& adapter_name) const {
  auto tensors = owner_tensors();
  if (adapter_name == in_use_) return tensors;
  for (auto& [name, tensor] : tensors) tensor = parameters_[key(adapter_name, name)];
  return tensors;
}

bool TrainedCopyImpl::has(const std::string& adapter_name) const {
  return std::find(adapters.begin(), adapters.end(), adapter_name) != adapters.end();
}

void TrainedCopyImpl::add(const std::string& adapter_name) {
  for (const auto& [name, tensor] : values("")) hold(adapter_name, name, tensor.detach().clone());
  adapters.push_back(adapter_name);
}

void TrainedCopyImpl::remove(const std::string& adapter_name) {
  if (in_use_ == adapter_name) put("");
  for (const auto& [name, tensor] : owner_tensors()) {
    parameters_.erase(key(adapter_name, name));
    versions_.erase(key(adapter_name, name));
  }
  std::erase(adapters, adapter_name);
  std::erase(active, adapter_name);
  use(active, enabled);
}

void TrainedCopyImpl::detach() {
  const auto self = shared_from_this();
  owner_->unregister_module(kName);
}

// Replaces the values in the module's tensors by those of an adapter's copy. The tensor objects stay the
// same, because an optimizer may refer to them.
void TrainedCopyImpl::put(const std::string& adapter_name) {
  for (auto& [name, tensor] : owner_tensors()) {
    Tensor &former = parameters_[key(in_use_, name)], &next = parameters_[key(adapter_name, name)];
    auto* changed = tensor.unsafeGetTensorImpl();
    versions_[key(in_use_, name)] = changed->version_counter();
    former.set_data(tensor.detach());
    Tensor(tensor).set_data(next.detach());
    next.set_data(at::empty({0}, next.options()));
    changed->set_version_counter(versions_[key(adapter_name, name)]);
  }
  in_use_ = adapter_name;
}

void TrainedCopyImpl::use(const std::vector<std::string>& names, bool enable) {
  active = names;
  enabled = enable;
  const auto chosen = std::find_if(names.begin(), names.end(), [&](const auto& name) { return has(name); });
  const std::string used_copy = enable && chosen != names.end() ? *chosen : "";
  if (used_copy != in_use_) put(used_copy);
  for (auto& item : owner_->named_parameters()) {
    if (!is_ours(item.key()) && item.value().is_floating_point())
      item.value().requires_grad_(!used_copy.empty());
  }
}

void TrainedCopyImpl::set_merged(bool now) {
  merged = now;
  if (!now) return use(active, enabled);
  for (auto& item : owner_->named_parameters()) item.value().requires_grad_(false);
}

std::vector<std::pair<std::string, TrainedCopyImpl*>> trained_copies(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, TrainedCopyImpl*>> copies;
  for (const auto& [name, copy] : all_of<TrainedCopyImpl>(module)) {
    const auto end = name.size() - std::string(TrainedCopyImpl::kName).size();
    copies.emplace_back(name.substr(0, end == 0 ? 0 : end - 1), copy);
  }
  return copies;
}

bool is_inside(const std::string& name, const std::vector<std::string>& modules) {
  return std::any_of(modules.begin(), modules.end(),
                     [&](const auto& module) { return name == module || name.starts_with(module + "."); });
}

bool shares_parameter(const torch::nn::Module& module, const std::string& name) {
  std::set<const torch::nn::Module*> inside;
  std::set<const void*> own;
  const auto tensors = [](const torch::nn::Module& each) {
    auto tensors = each.parameters(/*recurse=*/false);
    // A layer may be tied by its member alone, without a change of its registered parameters.
    if (const auto* linear = each.as<nn::AdaptableLinearImpl>()) tensors.push_back(linear->weight);
    return tensors;
  };
  for (const auto& [path, each] : modules(module)) {
    if (!is_inside(path, {name})) continue;
    inside.insert(each);
    for (const Tensor& tensor : tensors(*each)) own.insert(tensor.unsafeGetTensorImpl());
  }
  for (const auto& [path, each] : modules(module)) {
    if (inside.count(each) > 0) continue;
    for (const Tensor& tensor : tensors(*each)) {
      if (tensor.defined() && own.count(tensor.unsafeGetTensorImpl()) > 0) return true;
    }
  }
  return false;
}

std::vector<std::string> saved_modules(const std::string& caller, const torch::nn::Module& module,
                                       const std::vector<std::string>& targets) {
  std::vector<std::string> result;
  for (const auto& target : targets) {
    bool any = false;
    for (const auto& [name, each] : modules(module)) {
      if (name.empty() || !matches(name, {target})) continue;
      any = true;
      for (const auto& [inner, layer] : all_of<nn::AdaptableLayer>(*each)) {
        const auto* linear = dynamic_cast<const nn::AdaptableLinearImpl*>(layer);
        TORCH_CHECK_VALUE(
            !layer->has_adapter() && (linear == nullptr || !linear->is_quantized()), caller,
            ": modules_to_save: expected modules without adapters or quantised weights, received ", name);
      }
      TORCH_CHECK_VALUE(
          all_of<nn::QuantizedLinearImpl>(*each).empty(), caller,
          ": modules_to_save: expected modules without adapters or quantised weights, received ", name);
      // A trained copy takes the place of the module's tensors, which would change the other module too.
      TORCH_CHECK_VALUE(
          !shares_parameter(module, name), caller,
          ": modules_to_save: expected modules with parameters of their own, received ", name,
          ", whose parameter another module has as well; give one of the modules a copy of the parameter");
      if (!is_inside(name, result)) result.push_back(name);
    }
    TORCH_CHECK_VALUE(any, caller, ": modules_to_save: expected names of modules, received '", target,
                      "', which matches nothing");
  }
  return result;
}

TrainedCopyImpl& add_copy(torch::nn::Module& module, const std::string& name,
                          const std::string& adapter_name) {
  for (const auto& [owner, copy] : trained_copies(module)) {
    if (owner != name) continue;
    // unmerge cannot undo a merge once an adapter was added, so the merged copies are dropped.
    if (copy->merged) {
      copy->detach();
      break;
    }
    if (!copy->has(adapter_name)) copy->add(adapter_name);
    return *copy;
  }
  for (const auto& [owner_name, owner] : modules(module)) {
    if (owner_name != name) continue;
    const auto copy =
        owner->register_module(TrainedCopyImpl::kName, std::make_shared<TrainedCopyImpl>(*owner));
    copy->add(adapter_name);
    return *copy;
  }
  TORCH_INTERNAL_ASSERT(false, name);
}

}  // namespace shoestring::lora
