// Groups of parameters for muP. Spectral conditions (arXiv 2310.17813) give the table of MupGroup in one
// formula each: Adam's rate is proportional to 1 / fan_in, SGD's to fan_out / fan_in, and the deviation to
// min(1, sqrt(fan_out / fan_in)) / sqrt(fan_in).

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <unordered_map>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <shoestring/nn/init.h>

#include "core/name_patterns.h"

namespace shoestring::nn::init {
namespace {

using at::Tensor;

constexpr const char* kMup = "mup_groups";

/// Fan-in and fan-out of a parameter, as multiples of those of the base model.
struct Ratios {
  double in = 1, out = 1;
  bool operator==(const Ratios&) const = default;

  const char* kind() const {
    if (in == 1) return out == 1 ? "fixed" : "input";
    return out == 1 ? "output" : "hidden";
  }
  double lr(bool sgd) const { return sgd ? out / in : 1 / in; }
  double deviation() const { return std::min(1.0, std::sqrt(out / in)) / std::sqrt(in); }
};

/// A parameter with the module and the name that it has there.
struct Role {
  std::string name, key, module;
  Tensor tensor;
};

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::vector<Role> roles_of(const torch::nn::Module& module) {
  std::vector<Role> roles;
  const auto add = [&](const std::string& prefix, const torch::nn::Module& m) {
    std::string type = m.name();
    if (ends_with(type, "Impl")) type.resize(type.size() - 4);
    for (const auto& p : m.named_parameters(/*recurse=*/false)) {
      if (!p.value().defined()) continue;  // a layer without bias
      roles.push_back({prefix.empty() ? p.key() : prefix + "." + p.key(), p.key(), type, p.value()});
    }
  };
  add("", module);
  for (const auto& child : module.named_modules("", /*include_self=*/false)) add(child.key(), *child.value());
  return roles;
}

/// Returns the dimensions (fan-in, fan-out) of a matrix of a known module, or none.
std::optional<std::pair<int64_t, int64_t>> dimensions_of(const Role& role) {
  const auto is = [&](const char* type) { return ends_with(role.module, type); };
  const bool is_conv = is("1d") || is("2d") || is("3d");
  if (is("MultiheadAttention") && ends_with(role.key, "proj_weight")) return std::pair(1, 0);
  if (role.key != "weight") return std::nullopt;
  if (is("Embedding") || is("EmbeddingBag")) return std::pair(0, 1);
  if (is_conv && role.module.find("ConvTranspose") != std::string::npos) return std::pair(0, 1);
  if (is("Linear") || (is_conv && role.module.find("Conv") != std::string::npos)) return std::pair(1, 0);
  return std::nullopt;
}

/// Returns the ratio of fan-in and fan-out from the ratio of each dimension.
Ratios ratios_of(const Role& role, const std::vector<double>& each, const MupOptions& options) {
  std::vector<double> grown;
  std::copy_if(each.begin(), each.end(), std::back_inserter(grown), [](double r) { return r != 1; });
  const bool is_even = std::adjacent_find(grown.begin(), grown.end(), std::not_equal_to<>()) == grown.end();
  for (const auto& [pattern, kind] : options.kinds()) {
    if (!matches(pattern, role.name) || grown.empty()) continue;
    TORCH_CHECK_VALUE(is_even, kMup, ": kinds: expected dimensions of ", role.name,
                      " that grow by the same factor, received others");
    return kind == "input" ? Ratios{1, grown[0]} : Ratios{grown[0], 1};
  }
  if (grown.empty()) return {};
  if (each.size() == 1) return {1, each[0]};
  if (const auto known = dimensions_of(role)) return {each[known->first], each[known->second]};
  TORCH_CHECK_VALUE(grown.size() > 1 && is_even, kMup, ": kinds: expected \"input\" or \"output\" for ",
                    role.name, ", since its module does not tell it, received none");
  return {grown[0], grown[0]};
}

using RatiosOf = std::function<std::vector<double>(const Role&)>;

struct Parameter {
  std::string name;
  Tensor tensor;
  Ratios ratios;
};

std::vector<Parameter> parameters_of(const torch::nn::Module& module, const RatiosOf& ratios,
                                     const MupOptions& options) {
  TORCH_CHECK_VALUE(options.optimizer() == "adam" || options.optimizer() == "sgd", kMup,
                    ": optimizer: expected \"adam\" or \"sgd\", received \"", options.optimizer(), "\"");
  const std::vector<Role> roles = roles_of(module);
  std::vector<std::string> names;
  for (const Role& role : roles) names.push_back(role.name);
  for (const auto& [pattern, kind] : options.kinds()) {
    matching(kMup, "kinds", pattern, names);
    TORCH_CHECK_VALUE(kind == "input" || kind == "output", kMup,
                      ": kinds: expected \"input\" or \"output\" for \"", pattern, "\", received \"", kind,
                      "\"");
  }
  std::vector<Parameter> found;
  std::unordered_map<const void*, size_t> seen;
  for (const Role& role : roles) {
    if (!role.tensor.requires_grad()) continue;
    const Ratios own = ratios_of(role, ratios(role), options);
    const auto [entry, is_new] = seen.try_emplace(role.tensor.unsafeGetTensorImpl(), found.size());
    if (is_new) {
      found.push_back({role.name, role.tensor, own});
      continue;
    }
    const Parameter& before = found[entry->second];
    TORCH_CHECK_VALUE(before.ratios == own, kMup, ": ", role.name, ": expected one role, received that of \"",
                      before.ratios.kind(), "\" (", before.name, ") and of \"", own.kind(),
                      "\". Untie the weights.");
  }
  return found;
}

std::vector<Parameter> parameters_of(const torch::nn::Module& module, const torch::nn::Module& base,
                                     const MupOptions& options,
                                     std::unordered_map<std::string, Tensor>& base_tensors) {
  for (const Role& role : roles_of(base)) base_tensors.emplace(role.name, role.tensor);
  const auto ratios = [&](const Role& role) {
    const auto found = base_tensors.find(role.name);
    TORCH_CHECK_VALUE(found != base_tensors.end(), kMup, ": base: expected a parameter ", role.name,
                      ", received none");
    TORCH_CHECK_VALUE(found->second.dim() == role.tensor.dim(), kMup, ": base: expected ", role.tensor.dim(),
                      " dimensions of ", role.name, ", received ", found->second.dim());
    std::vector<double> each;
    for (int64_t d = 0; d < role.tensor.dim(); ++d) {
      const auto size = role.tensor.size(d), before = found->second.size(d);
      each.push_back(size == before ? 1 : static_cast<double>(size) / static_cast<double>(before));
    }
    return each;
  };
  return parameters_of(module, ratios, options);
}

std::vector<MupGroup> grouped(const std::vector<Parameter>& parameters, const MupOptions& options) {
  std::vector<MupGroup> groups;
  for (const Parameter& p : parameters) {
    const MupGroup wanted{
        p.ratios.kind(), p.ratios.lr(options.optimizer() == "sgd"), p.ratios.deviation(), {}, {}};
    auto group = std::find_if(groups.begin(), groups.end(), [&](const MupGroup& g) {
      return g.kind == wanted.kind && g.lr_multiplier == wanted.lr_multiplier &&
             g.std_multiplier == wanted.std_multiplier;
    });
    if (group == groups.end()) group = groups.insert(group, wanted);
    group->names.push_back(p.name);
    group->params.push_back(p.tensor);
  }
  return groups;
}

double deviation_of(const Tensor& t) {
  return t.numel() < 2 ? 0 : t.detach().to(at::kDouble).std().item<double>();
}

}  // namespace

std::vector<MupGroup> mup_groups(const torch::nn::Module& module, const torch::nn::Module& base,
                                 const MupOptions& options) {
  std::unordered_map<std::string, Tensor> base_tensors;
  return grouped(parameters_of(module, base, options, base_tensors), options);
}

std::vector<MupGroup> mup_groups_by_size(const torch::nn::Module& module,
                                         const std::map<int64_t, int64_t>& base_widths,
                                         const MupOptions& options) {
  std::set<int64_t> sizes;
  for (const Role& role : roles_of(module))
    sizes.insert(role.tensor.sizes().begin(), role.tensor.sizes().end());
  for (const auto& [width, base] : base_widths) {
    TORCH_CHECK_VALUE(width > 0 && base > 0, kMup, ": base_widths: expected numbers above 0, received ",
                      width, " and ", base);
    TORCH_CHECK_VALUE(sizes.count(width) > 0, kMup, ": base_widths: expected sizes of dimensions, received ",
                      width, ", which no parameter has");
  }
  const auto ratios = [&](const Role& role) {
    std::vector<double> each;
    for (const int64_t size : role.tensor.sizes()) {
      const auto found = base_widths.find(size);
      each.push_back(found == base_widths.end() || found->second == size
                         ? 1
                         : static_cast<double>(size) / static_cast<double>(found->second));
    }
    return each;
  };
  return grouped(parameters_of(module, ratios, options), options);
}

void mup_(torch::nn::Module& module, const torch::nn::Module& base, const MupOptions& options) {
  const at::NoGradGuard no_grad;
  std::unordered_map<std::string, Tensor> base_tensors;
  for (Parameter& p : parameters_of(module, base, options, base_tensors)) {
    if (p.ratios.in == 1) continue;
    const double own = deviation_of(p.tensor);
    const double wanted = deviation_of(base_tensors.at(p.name)) * p.ratios.deviation();
    if (own > 0) p.tensor.mul_(wanted / own);
  }
}

}  // namespace shoestring::nn::init
