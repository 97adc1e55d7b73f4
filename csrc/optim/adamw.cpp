#include <algorithm>
#include <map>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/optim/serialize.h>

#include <shoestring/ops.h>
#include <shoestring/optim.h>

#include "kernels/adamw.h"

namespace shoestring::optim {
namespace {

using at::Tensor;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr int64_t kBlock = kernels::kStateBlock;
constexpr int64_t kFormatVersion = 1;

int64_t padded(const Tensor& param) { return (param.numel() + kBlock - 1) / kBlock * kBlock; }

void check(const AdamWOptions& options) {
  constexpr const char* kName = "shoestring::optim::AdamW";
  const auto [beta1, beta2] = options.betas();
  TORCH_CHECK(options.lr() >= 0, kName, ": lr: expected a number of at least 0, received ", options.lr());
  TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, kName,
              ": betas: expected two numbers in [0, 1), received ", beta1, " and ", beta2);
  TORCH_CHECK(options.eps() >= 0, kName, ": eps: expected a number of at least 0, received ", options.eps());
  TORCH_CHECK(options.weight_decay() >= 0, kName, ": weight_decay: expected a number of at least 0, received ",
              options.weight_decay());
  TORCH_CHECK(options.state() == "8bit" || options.state() == "fp32", kName,
              ": state: expected \"8bit\" or \"fp32\", received \"", options.state(), "\"");
}

const AdamWOptions& checked(const AdamWOptions& options) {
  check(options);
  return options;
}

}  // namespace

void AdamWOptions::serialize(OutputArchive& archive) const {
  const auto [beta1, beta2] = betas();
  archive.write("lr", c10::IValue(lr()));
  archive.write("beta1", c10::IValue(beta1));
  archive.write("beta2", c10::IValue(beta2));
  archive.write("eps", c10::IValue(eps()));
  archive.write("weight_decay", c10::IValue(weight_decay()));
  archive.write("state", c10::IValue(state()));
  archive.write("maximize", c10::IValue(maximize()));
}

void AdamWOptions::serialize(InputArchive& archive) {
  const auto read = [&](const char* name) {
    c10::IValue value;
    archive.read(name, value);
    return value;
  };
  lr(read("lr").toDouble());
  betas({read("beta1").toDouble(), read("beta2").toDouble()});
  eps(read("eps").toDouble());
  weight_decay(read("weight_decay").toDouble());
  state(read("state").toStringRef());
  maximize(read("maximize").toBool());
}

void AdamWParamState::serialize(OutputArchive& archive) const {
  // An archive writes whole storages, and these are views into an arena that all parameters share.
  const auto write = [&](const char* name, const Tensor& t) {
    if (t.defined()) archive.write(name, t.clone(), /*is_buffer=*/true);
  };
  write("step", step());
  write("exp_avg", exp_avg());
  write("exp_avg_scale", exp_avg_scale());
  write("exp_avg_sq", exp_avg_sq());
  write("exp_avg_sq_scale", exp_avg_sq_scale());
}

void AdamWParamState::serialize(InputArchive& archive) {
  archive.read("step", step(), /*is_buffer=*/true);
  archive.read("exp_avg", exp_avg(), /*is_buffer=*/true);
  archive.try_read("exp_avg_scale", exp_avg_scale(), /*is_buffer=*/true);
  archive.read("exp_avg_sq", exp_avg_sq(), /*is_buffer=*/true);
  archive.try_read("exp_avg_sq_scale", exp_avg_sq_scale(), /*is_buffer=*/true);
}

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, AdamWOptions defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::make_unique<AdamWOptions>(checked(defaults))) {
  for (const auto& group : param_groups) add_param_group(group);
}

void AdamW::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  if (group.has_options()) check(static_cast<const AdamWOptions&>(group.options()));
  Optimizer::add_param_group(group);
  if (group.has_options()) this->param_groups().back().set_options(group.options().clone());
}

AdamW::Arena AdamW::make_arena(const std::vector<Tensor>& params, const std::string& state) {
  int64_t elements = 0;
  for (const auto& p : params) elements += padded(p);
  const auto fp32 = params[0].options().dtype(at::kFloat).requires_grad(false);
  const bool quantized = state == "8bit";
  Arena arena;
  arena.params = params;
  arena.step = at::zeros({static_cast<int64_t>(params.size())}, fp32);
  arena.exp_avg = at::zeros({elements}, quantized ? fp32.dtype(at::kByte) : fp32);
  arena.exp_avg_sq = at::zeros_like(arena.exp_avg);
  if (quantized) {
    arena.exp_avg_scale = at::zeros({elements / kBlock}, fp32);
    arena.exp_avg_sq_scale = at::zeros({elements / kBlock}, fp32);
  }

  // New views for every parameter first, then the old state into them: a refused copy leaves the optimizer as it was.
  std::vector<std::unique_ptr<AdamWParamState>> states;
  int64_t begin = 0;
  for (size_t i = 0; i < params.size(); begin += padded(params[i++])) {
    auto s = std::make_unique<AdamWParamState>();
    const auto shaped = [&](const Tensor& t) { return t.narrow(0, begin, params[i].numel()).view(params[i].sizes()); };
    s->step(arena.step.select(0, static_cast<int64_t>(i)));
    s->exp_avg(shaped(arena.exp_avg));
    s->exp_avg_sq(shaped(arena.exp_avg_sq));
    if (quantized) {
      s->exp_avg_scale(arena.exp_avg_scale.narrow(0, begin / kBlock, padded(params[i]) / kBlock));
      s->exp_avg_sq_scale(arena.exp_avg_sq_scale.narrow(0, begin / kBlock, padded(params[i]) / kBlock));
    }
    auto found = state_.find(params[i].unsafeGetTensorImpl());
    if (found != state_.end()) {
      const auto& old = static_cast<const AdamWParamState&>(*found->second);
      const auto copy = [&](const char* name, const Tensor& to, const Tensor& from) {
        if (!to.defined() && !from.defined()) return;
        TORCH_CHECK(to.defined() && from.defined() && to.sizes() == from.sizes() && to.dtype() == from.dtype(),
                    "shoestring::optim::AdamW: ", name, ": the state of parameter ", i, " does not fit state=\"", state,
                    "\" and the parameter's shape, ", params[i].sizes());
        to.copy_(from);
      };
      copy("step", s->step(), old.step());
      copy("exp_avg", s->exp_avg(), old.exp_avg());
      copy("exp_avg_scale", s->exp_avg_scale(), old.exp_avg_scale());
      copy("exp_avg_sq", s->exp_avg_sq(), old.exp_avg_sq());
      copy("exp_avg_sq_scale", s->exp_avg_sq_scale(), old.exp_avg_sq_scale());
    }
    states.push_back(std::move(s));
  }
  for (size_t i = 0; i < params.size(); ++i) state_[params[i].unsafeGetTensorImpl()] = std::move(states[i]);
  return arena;
}

void AdamW::set_max_grad_norm(std::optional<double> max_grad_norm) {
  TORCH_CHECK(!max_grad_norm || *max_grad_norm > 0,
              "shoestring::optim::AdamW: max_grad_norm: expected a number above 0, or none, received ",
              max_grad_norm.value_or(0));
  max_grad_norm_ = max_grad_norm;
}

// An undefined tensor where nothing is clipped. Norms are fp32 also for 16-bit gradients; nothing waits for a device.
Tensor AdamW::clip_coef() {
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

Tensor AdamW::step(LossClosure closure) {
  Tensor loss;
  if (closure != nullptr) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  torch::NoGradGuard no_grad;
  const Tensor clip = clip_coef();
  arenas_.resize(param_groups_.size());
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& options = static_cast<const AdamWOptions&>(param_groups_[g].options());
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
    if (in_arena != params.size() || in_arena != arena.params.size()) arena = make_arena(params, options.state());

    std::vector<std::optional<Tensor>> grads;
    for (const auto& p : params) grads.push_back(p.grad().defined() ? std::optional<Tensor>(p.grad()) : std::nullopt);
    const auto some = [](const Tensor& t) { return t.defined() ? std::optional<Tensor>(t) : std::nullopt; };
    AdamWState state{arena.step, arena.exp_avg, arena.exp_avg_sq, some(arena.exp_avg_scale),
                     some(arena.exp_avg_sq_scale)};
    const auto [beta1, beta2] = options.betas();
    const Tensor coef = clip.defined() ? clip.to(params[0].device()) : clip;
    adamw_(params, grads, state,
           AdamWStepOptions()
               .lr(options.lr())
               .beta1(beta1)
               .beta2(beta2)
               .eps(options.eps())
               .weight_decay(options.weight_decay())
               .maximize(options.maximize())
               .clip_coef(some(coef)));
  }
  return loss;
}

void AdamW::save(OutputArchive& archive) const {
  archive.write("format_version", c10::IValue(kFormatVersion));
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, *this);
}

void AdamW::load(InputArchive& archive) {
  c10::IValue version;
  TORCH_CHECK(archive.try_read("format_version", version) && version.toInt() == kFormatVersion,
              "shoestring::optim::AdamW: load: expected an archive of this optimizer, format_version ", kFormatVersion);
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, *this);
  arenas_.clear();  // what was loaded moves into new ones at the next step
}

}  // namespace shoestring::optim
