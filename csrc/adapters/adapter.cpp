#include <cmath>
#include <utility>

#include <ATen/Functions.h>

#include <shoestring/adapters/adapter.h>

#include "adapters/names.h"

namespace shoestring::nn {

using at::Tensor;

double LoraOptions::scaling() const {
  const double rank = static_cast<double>(rank_);
  return alpha_ / (rslora_ ? std::sqrt(rank) : rank);
}

bool LoraOptions::changes_base() const {
  return init_.starts_with("pissa") || init_ == "olora" || init_ == "loftq";
}

AdapterImpl::AdapterImpl(AnyAdapterOptions adapter_options, const Tensors& values)
    : options(std::move(adapter_options)) {
  for (const auto& item : values) tensors.insert(item.key(), register_parameter(item.key(), item.value()));
}

// Allocates new tensors for a cloned adapter. clone() calls reset() on the clone, which until then refers to
// the original adapter's tensors.
void AdapterImpl::reset() {
  for (auto& item : tensors) {
    item.value() = register_parameter(item.key(), at::empty_like(item.value()), item.value().requires_grad());
  }
  for (auto& item : fixed) item.value() = register_buffer(item.key(), at::empty_like(item.value()));
}

const Tensor& AdapterImpl::operator[](const std::string& name) const {
  return fixed.contains(name) ? fixed[name] : tensors[name];
}

Tensor& AdapterImpl::operator[](const std::string& name) {
  return fixed.contains(name) ? fixed[name] : tensors[name];
}

void AdapterImpl::set_fixed(const std::string& name, const Tensor& value) {
  if (fixed.contains(name)) {
    // Replaces the buffer's value, because LibTorch cannot unregister a buffer.
    fixed[name].set_data(value.detach());
  } else {
    fixed.insert(name, register_buffer(name, value));
  }
}

std::vector<std::string> AdaptableLayer::current() const {
  std::vector<std::string> names;
  if (!enabled) return names;
  if (rows.has_value()) return rows->names;
  for (const auto& name : active) {
    if (adapters.contains(name)) names.push_back(name);
  }
  return names;
}

double AdaptableLayer::dropout() const {
  if (!dynamic_cast<const torch::nn::Module&>(*this).is_training()) return 0;
  std::optional<double> shared;
  for (const auto& name : current()) {
    const auto& options = adapters[name]->options;
    const auto* vera = std::get_if<VeraOptions>(&options);
    const auto* low_rank = std::get_if<LoraOptions>(&options);
    const double rate = vera != nullptr ? vera->dropout() : low_rank != nullptr ? low_rank->dropout() : 0;
    TORCH_CHECK_VALUE(
        shared.value_or(rate) == rate,
        "lora: dropout: expected the same dropout for all active adapters in training, received ", *shared,
        " and ", rate);
    shared = rate;
  }
  return shared.value_or(0);
}

void AdaptableLayer::check_kind(const AnyAdapterOptions& options, const std::string& caller,
                                const std::string& name) const {
  const char* const kinds[] = {"LoRA", "IA3", "VeRA"};
  for (const auto& item : adapters) {
    const size_t present = item.value()->options.index();
    TORCH_CHECK_VALUE(present == options.index(), caller, ": adapter: expected adapters of the kind that ",
                      name, " has, ", kinds[present], ", received ", kinds[options.index()]);
  }
}

void AdaptableLayer::add_adapter(const AnyAdapterOptions& options, const std::string& adapter_name,
                                 AdapterImpl::Tensors given) {
  lora::check_adapter("add_adapter", options);
  lora::check_name("add_adapter", adapter_name);
  TORCH_CHECK_VALUE(!adapters.contains(adapter_name),
                    "add_adapter: adapter_name: expected a new name, but the layer has an adapter '",
                    adapter_name, "'; merge or delete it first");
  shapes(options, "add_adapter", "this layer");
  if (given.is_empty()) given = prepare(options);
  auto values = start(options);
  for (const auto& item : given) {
    if (values.contains(item.key())) values[item.key()] = item.value();
  }
  put_adapter(adapter_name, options, values);
  for (const auto& item : given) {
    const bool vera = !values.contains(item.key());
    const std::string name =
        // The initial lora_A is stored under the name "initial_A", and the initial lora_B under "initial_B".
        vera ? item.key() : "initial_" + item.key().substr(5);
    adapters[adapter_name]->set_fixed(
        name, vera ? item.value().to(adapter_type()) : item.value().to(adapter_type(), false, true));
  }
}

void AdaptableLayer::put_adapter(const std::string& adapter_name, const AnyAdapterOptions& options,
                                 const AdapterImpl::Tensors& values) {
  const torch::NoGradGuard no_grad;
  freeze();
  Adapter* former = adapters.find(adapter_name);
  bool same = former != nullptr && (*former)->tensors.size() == values.size();
  for (const auto& item : values) {
    same = same && (*former)->tensors.contains(item.key()) &&
           (*former)->tensors[item.key()].sizes() == item.value().sizes();
  }
  if (same) {
    for (const auto& item : values) (*former)->tensors[item.key()].copy_(item.value());
    (*former)->options = options;
  } else {
    auto& module = dynamic_cast<torch::nn::Module&>(*this);
    if (former != nullptr) module.unregister_module(adapter_name);
    AdapterImpl::Tensors copies;
    for (const auto& item : values)
      copies.insert(item.key(), item.value().detach().to(adapter_type(), false, /*copy=*/true).contiguous());
    const Adapter adapter = module.register_module(adapter_name, Adapter(options, copies));
    if (former != nullptr) {
      adapters[adapter_name] = adapter;
    } else {
      adapters.insert(adapter_name, adapter);
    }
  }
  active = {adapter_name};
}

void AdaptableLayer::delete_adapter(const std::string& adapter_name) {
  TORCH_CHECK_VALUE(adapters.contains(adapter_name),
                    "delete_adapter: adapter_name: expected the name of an adapter of this layer, "
                    "received '",
                    adapter_name, "'");
  dynamic_cast<torch::nn::Module&>(*this).unregister_module(adapter_name);
  adapters.erase(adapter_name);
  std::erase(active, adapter_name);
}

Tensor AdaptableLayer::uses(const std::string& adapter_name, const Tensor& x) const {
  if (!rows.has_value() || !enabled) return Tensor();
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(0) == rows->uses.size(0),
                    "lora::AdaptersPerRowGuard: adapter_names: expected one name for each of the ",
                    x.dim() > 0 ? x.size(0) : 1, " rows of the batch that reached a layer, received ",
                    rows->uses.size(0));
  const auto index = std::find(rows->names.begin(), rows->names.end(), adapter_name) - rows->names.begin();
  return rows->uses.narrow(1, index, 1);
}

void AdaptableLayer::register_adapters() {
  for (auto& item : adapters)
    dynamic_cast<torch::nn::Module&>(*this).register_module(item.key(), item.value());
}

void AdaptableLayer::unregister_adapters() {
  for (auto& item : adapters) dynamic_cast<torch::nn::Module&>(*this).unregister_module(item.key());
  adapters.clear();
  active.clear();
}

}  // namespace shoestring::nn
