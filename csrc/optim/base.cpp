#include "optim/base.h"

#include <map>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "kernels/optimizer.h"

namespace shoestring::optim {
namespace {

using at::Tensor;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr int64_t kBlock = kernels::kStateBlock;
constexpr int64_t kFormatVersion = 1;

int64_t padded(const Tensor& param) { return (param.numel() + kBlock - 1) / kBlock * kBlock; }

std::optional<Tensor> some(const Tensor& t) { return t.defined() ? std::optional<Tensor>(t) : std::nullopt; }

}  // namespace

void detail::save_parts(OutputArchive& archive, const Parts<const Tensor>& parts) {
  // An archive writes whole storages, and these are views into an arena that all parameters share.
  for (const auto& [name, t] : parts) {
    if (t->defined()) archive.write(name, t->clone(), /*is_buffer=*/true);
  }
}

void detail::load_parts(InputArchive& archive, const Parts<Tensor>& parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& [name, t] = parts[i];
    const bool is_scale = i > 0 && i % 2 == 0;
    if (is_scale) {
      archive.try_read(name, *t, /*is_buffer=*/true);
    } else {
      archive.read(name, *t, /*is_buffer=*/true);
    }
  }
}

LowMemoryOptimizer::LowMemoryOptimizer(const detail::Rule& rule,
                                       const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                                       std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)), rule_(&rule) {
  rule_->check(*defaults_);
  for (const auto& group : param_groups) add_param_group(group);
}

void LowMemoryOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  if (group.has_options()) rule_->check(group.options());
  Optimizer::add_param_group(group);
  if (group.has_options()) param_groups_.back().set_options(group.options().clone());
}

LowMemoryOptimizer::Arena LowMemoryOptimizer::make_arena(const std::vector<Tensor>& params,
                                                         const torch::optim::OptimizerOptions& options) {
  int64_t elements = 0;
  for (const auto& p : params) elements += padded(p);
  const auto fp32 = params[0].options().dtype(at::kFloat).requires_grad(false);
  const bool quantized = rule_->state(options) == "8bit";
  Arena arena;
  arena.params = params;
  arena.step = at::zeros({static_cast<int64_t>(params.size())}, fp32);
  const size_t parts_of_one = rule_->parts(*rule_->new_state()).size();
  for (size_t k = 1; k < parts_of_one; k += 2) {
    arena.moments.push_back(at::zeros({elements}, quantized ? fp32.dtype(at::kByte) : fp32));
    arena.moments.push_back(quantized ? at::zeros({elements / kBlock}, fp32) : Tensor());
  }

  // New views for every parameter first, then the old state into them: a refused copy leaves the optimizer as it was.
  std::vector<std::unique_ptr<torch::optim::OptimizerParamState>> states;
  int64_t begin = 0;
  for (size_t i = 0; i < params.size(); begin += padded(params[i++])) {
    states.push_back(rule_->new_state());
    const auto parts = rule_->parts(*states.back());
    *parts[0].second = arena.step.select(0, static_cast<int64_t>(i));
    for (size_t k = 1; k < parts.size(); k += 2) {
      *parts[k].second = arena.moments[k - 1].narrow(0, begin, params[i].numel()).view(params[i].sizes());
      if (quantized) *parts[k + 1].second = arena.moments[k].narrow(0, begin / kBlock, padded(params[i]) / kBlock);
    }
    const auto found = state_.find(params[i].unsafeGetTensorImpl());
    if (found == state_.end()) continue;
    const auto old = rule_->parts(*found->second);
    for (size_t k = 0; k < parts.size(); ++k) {
      const Tensor &to = *parts[k].second, &from = *old[k].second;
      if (!to.defined() && !from.defined()) continue;
      TORCH_CHECK(to.defined() && from.defined() && to.sizes() == from.sizes() && to.dtype() == from.dtype(),
                  "shoestring::optim::", rule_->name, ": ", parts[k].first, ": the state of parameter ", i,
                  " does not fit state=\"", rule_->state(options), "\" and the parameter's shape, ", params[i].sizes());
      to.copy_(from);
    }
  }
  for (size_t i = 0; i < params.size(); ++i) state_[params[i].unsafeGetTensorImpl()] = std::move(states[i]);
  return arena;
}

void LowMemoryOptimizer::set_max_grad_norm(std::optional<double> max_grad_norm) {
  TORCH_CHECK(!max_grad_norm || *max_grad_norm > 0, "shoestring::optim::", rule_->name,
              ": max_grad_norm: expected a number above 0, or none, received ", max_grad_norm.value_or(0));
  max_grad_norm_ = max_grad_norm;
}

// An undefined tensor where nothing is clipped. Norms are fp32 also for 16-bit gradients; nothing waits for a device.
Tensor LowMemoryOptimizer::clip_coef() {
  grad_norm_ = Tensor();
  if (!max_grad_norm_) return {};
  std::vector<Tensor> norms;
  for (auto& group : param_groups_) {
    std::map<at::ScalarType, std::vector<Tensor>> grads;  // the one-launch norm takes one dtype at a time
    for (const auto& p : group.params()) {
      if (p.grad().defined()) grads[p.grad().scalar_type()].push_back(p.grad());
    }
    for (const auto& [type, same] : grads) {
      for (const auto& norm : at::_foreach_norm(same, 2, at::kFloat)) norms.push_back(norm);
    }
  }
  if (norms.empty()) return {};
  for (auto& norm : norms) norm = norm.to(norms[0].device());
  grad_norm_ = at::linalg_vector_norm(at::stack(norms));
  return ((grad_norm_ + 1e-6).reciprocal() * *max_grad_norm_).clamp_max(1);
}

Tensor LowMemoryOptimizer::step(LossClosure closure) {
  Tensor loss;
  if (closure != nullptr) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  torch::NoGradGuard no_grad;
  const Tensor clip = clip_coef();
  arenas_.resize(param_groups_.size());
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& options = param_groups_[g].options();
    Arena& arena = arenas_[g];

    // The arena holds every parameter that has had a gradient, and is made again when another one gets its first.
    std::vector<Tensor> params;
    bool any = false;
    size_t in_arena = 0;
    for (const auto& p : param_groups_[g].params()) {
      const bool stepped = p.grad().defined();
      any |= stepped;
      if (stepped || state_.count(p.unsafeGetTensorImpl()) > 0) params.push_back(p);
    }
    if (!any) continue;
    for (; in_arena < params.size() && in_arena < arena.params.size(); ++in_arena) {
      if (!params[in_arena].is_same(arena.params[in_arena])) break;
    }
    if (in_arena != params.size() || in_arena != arena.params.size()) arena = make_arena(params, options);

    c10::List<std::optional<Tensor>> grads;
    for (const auto& p : params) grads.push_back(some(p.grad()));
    auto [name, arguments] = rule_->operator_of(options);
    arguments.insert(arguments.end(), {{"params", params}, {"grads", grads}, {"step", arena.step}});
    const auto parts = rule_->parts(*rule_->new_state());
    for (size_t k = 1; k < parts.size(); ++k) arguments.push_back({parts[k].first, some(arena.moments[k - 1])});
    arguments.push_back({"clip_coef", clip.defined() ? some(clip.to(params[0].device())) : std::nullopt});
    call_by_name(std::string("shoestring::") + name, arguments);
  }
  return loss;
}

void LowMemoryOptimizer::save(OutputArchive& archive) const {
  archive.write("format_version", c10::IValue(kFormatVersion));
  archive.write("optimizer", c10::IValue(std::string(rule_->name)));
  rule_->save(archive, *this);
}

void LowMemoryOptimizer::load(InputArchive& archive) {
  c10::IValue version, optimizer("AdamW");  // AdamW's first archives do not say whose they are
  archive.try_read("optimizer", optimizer);
  const bool ours = archive.try_read("format_version", version);
  TORCH_CHECK(ours && version.toInt() == kFormatVersion && optimizer.toStringRef() == rule_->name,
              "shoestring::optim::", rule_->name, ": load: expected an archive of this optimizer, format_version ",
              kFormatVersion, ", received ",
              ours ? c10::str(optimizer.toStringRef(), "'s, format_version ", version.toInt()) : "another one");
  rule_->load(archive, *this);
  arenas_.clear();  // what was loaded moves into new ones at the next step
}

}  // namespace shoestring::optim
