// Groups of parameters for muP, of modules of LibTorch.

#include <algorithm>
#include <map>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <shoestring/layers/init.h>

#include "layers/mup_rule.h"

namespace shoestring::nn::init {
namespace {

using at::Tensor;

/// Returns the layout of a parameter. `key` is its name in a module of type `type`.
MupLayout layout_of(const std::string& type, const std::string& key) {
  const auto is = [&](const char* end) { return type.ends_with(end); };
  const bool is_conv = type.find("Conv") != std::string::npos && (is("1d") || is("2d") || is("3d"));
  if (is("MultiheadAttention") && key.ends_with("proj_weight")) return MupLayout::kOutIn;
  if (key != "weight") return MupLayout::kUnknown;
  if (is("Embedding") || is("EmbeddingBag")) return MupLayout::kInOut;
  if (is_conv && type.find("ConvTranspose") != std::string::npos) return MupLayout::kInOut;
  return is("Linear") || is_conv ? MupLayout::kOutIn : MupLayout::kUnknown;
}

/// The parameters of a module: a role and the tensor for each name.
struct Roles {
  std::vector<MupRole> roles;
  std::vector<Tensor> tensors;

  explicit Roles(const torch::nn::Module& module) {
    add("", module);
    for (const auto& child : module.named_modules("", /*include_self=*/false))
      add(child.key(), *child.value());
  }

  MupSizes sizes() const {
    MupSizes sizes_by_name;
    for (const MupRole& role : roles) sizes_by_name.emplace(role.name, role.sizes);
    return sizes_by_name;
  }

 private:
  void add(const std::string& prefix, const torch::nn::Module& module) {
    std::string type = module.name();
    if (type.ends_with("Impl")) type.resize(type.size() - 4);
    for (const auto& p : module.named_parameters(/*recurse=*/false)) {
      const Tensor& tensor = p.value();
      if (!tensor.defined()) continue;  // a layer without bias
      roles.push_back({prefix.empty() ? p.key() : prefix + "." + p.key(), layout_of(type, p.key()),
                       tensor.sizes().vec(), reinterpret_cast<int64_t>(tensor.unsafeGetTensorImpl()),
                       tensor.requires_grad()});
      tensors.push_back(tensor);
    }
  }
};

std::vector<MupGroup> grouped(const Roles& model, const std::vector<MupScale>& scales) {
  std::vector<MupGroup> groups;
  for (const MupScale& scale : scales) {
    auto group = std::find_if(groups.begin(), groups.end(), [&](const MupGroup& g) {
      return g.kind == scale.kind && g.lr_multiplier == scale.lr && g.std_multiplier == scale.deviation;
    });
    if (group == groups.end()) group = groups.insert(group, {scale.kind, scale.lr, scale.deviation, {}, {}});
    group->names.push_back(model.roles[scale.role].name);
    group->params.push_back(model.tensors[scale.role]);
  }
  return groups;
}

double deviation_of(const Tensor& t) {
  return t.numel() < 2 ? 0 : t.detach().to(at::kDouble).std().item<double>();
}

}  // namespace

std::vector<MupGroup> mup_groups(const torch::nn::Module& module, const torch::nn::Module& base,
                                 const MupOptions& options) {
  const Roles model(module);
  return grouped(model, mup_scales(model.roles, Roles(base).sizes(), options));
}

std::vector<MupGroup> mup_groups_by_size(const torch::nn::Module& module,
                                         const std::map<int64_t, int64_t>& base_widths,
                                         const MupOptions& options) {
  const Roles model(module);
  return grouped(model,
                 mup_scales(model.roles, sizes_by_width(base_widths, model.roles, "base_widths"), options));
}

void mup_(torch::nn::Module& module, const torch::nn::Module& base, const MupOptions& options) {
  const at::NoGradGuard no_grad;
  const Roles model(module), base_model(base);
  std::map<std::string, Tensor> base_tensors;
  for (size_t i = 0; i < base_model.roles.size(); ++i)
    base_tensors.emplace(base_model.roles[i].name, base_model.tensors[i]);
  for (const MupScale& scale : mup_scales(model.roles, base_model.sizes(), options)) {
    if (scale.kind != "hidden" && scale.kind != "output") continue;
    Tensor tensor = model.tensors[scale.role];
    const double before = deviation_of(tensor);
    const double target = deviation_of(base_tensors.at(model.roles[scale.role].name)) * scale.deviation;
    if (before > 0) tensor.mul_(target / before);
  }
}

}  // namespace shoestring::nn::init
