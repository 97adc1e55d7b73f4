#include "lora/names.h"

#include <shoestring/lora.h>

namespace shoestring::lora {

using nn::LinearImpl;

bool matches(const std::string& name, const std::vector<std::string>& targets) {
  for (const auto& target : targets) {
    if (name == target) return true;
    if (name.size() > target.size() && name.ends_with(target) && name[name.size() - target.size() - 1] == '.') return true;
  }
  return false;
}

std::vector<std::pair<std::string, LinearImpl*>> linears(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, LinearImpl*>> found;
  if (auto* own = const_cast<LinearImpl*>(module.as<LinearImpl>())) found.emplace_back("", own);
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    if (auto* linear = child.value()->as<LinearImpl>()) found.emplace_back(child.key(), linear);
  }
  return found;
}

namespace {

std::vector<std::pair<std::string, LinearImpl*>> targets(const torch::nn::Module& module,
                                                         const std::vector<std::string>& names) {
  auto all = linears(module);
  std::vector<std::pair<std::string, LinearImpl*>> found;
  if (names.empty()) found = all;
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    if (!matches(child.key(), names)) continue;
    auto* linear = child.value()->as<LinearImpl>();
    TORCH_CHECK_VALUE(linear != nullptr, "lora::apply: target_modules: expected shoestring::nn::Linear layers, received ",
                      child.key(), ", a ", child.value()->name(), "; declare it as shoestring::nn::Linear");
    found.emplace_back(child.key(), linear);
  }
  TORCH_CHECK_VALUE(!found.empty(), "lora::apply: target_modules: expected names of shoestring::nn::Linear layers, "
                                    "received names that match none of the module's ", all.size());
  return found;
}

}  // namespace

std::vector<std::string> apply(torch::nn::Module& module, const LoraOptions& options) {
  check_adapter("lora::apply", options.adapter());
  const auto found = targets(module, options.target_modules());
  const auto all = linears(module);
  const std::string& type = options.quantize();
  TORCH_CHECK_VALUE(type == "none" || type == "nf4" || type == "fp4" || type == "int4" || type == "int8",
                    "lora::apply: quantize: expected none, nf4, fp4, int4 or int8, received '", type, "'");
  TORCH_CHECK_VALUE(type != "int4" || !options.nested(),
                    "lora::apply: nested: expected false with int4, whose scales are bf16, received true");
  for (const auto& [name, linear] : all) {
    TORCH_CHECK_VALUE(!linear->has_adapter(), "lora::apply: module: expected one without adapters, but ", name,
                      " has one; merge it first");
  }
  for (auto& parameter : module.parameters()) parameter.requires_grad_(false);
  if (type != "none") {
    for (const auto& [name, linear] : all) {
      if (linear->is_quantized()) continue;
      linear->quantize(QuantizeOptions().quant_type(type).block_size(options.block_size()), options.nested());
    }
  }
  std::vector<std::string> names;
  for (const auto& [name, linear] : found) {
    linear->add_adapter(options.adapter());
    names.push_back(name);
  }
  return names;
}

void merge(torch::nn::Module& module, bool reversible) {
  int64_t count = 0;
  for (const auto& [name, linear] : linears(module)) {
    if (!linear->has_adapter()) continue;
    linear->merge(reversible);
    ++count;
  }
  TORCH_CHECK_VALUE(count > 0, "lora::merge: module: expected one with adapters, received one without");
}

void unmerge(torch::nn::Module& module) {
  int64_t count = 0;
  for (const auto& [name, linear] : linears(module)) {
    if (!linear->can_unmerge()) continue;
    linear->unmerge();
    ++count;
  }
  TORCH_CHECK_VALUE(count > 0, "lora::unmerge: module: expected one merged with reversible, received one without former weights");
}

}  // namespace shoestring::lora
