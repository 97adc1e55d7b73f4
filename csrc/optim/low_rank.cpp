#include <map>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/serialize/archive.h>

#include <shoestring/optim_wrappers.h>

#include "optim/core.h"
#include "optim/norm.h"
#include "optim/subspace.h"

namespace shoestring::optim::detail {
namespace {

using at::Tensor;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr int64_t kLowRankFormatVersion = 1;

// Returns an fp32 tensor of shape `sizes` that occupies the memory of one element. The low-rank stand-ins for
// the parameters are such tensors between steps.
Tensor hollow(at::IntArrayRef sizes, const Tensor& like) {
  return at::zeros({}, like.options().dtype(at::kFloat).requires_grad(false)).expand(sizes);
}

c10::IValue read_value(InputArchive& archive, const std::string& name) {
  c10::IValue value;
  archive.read(name, value);
  return value;
}

}  // namespace

LowRankCore::LowRankCore(const Method& method, BaseClass base, std::unique_ptr<OptimizerOptions> defaults)
    : Optimizer(std::vector<OptimizerParamGroup>(), std::move(defaults)), class_(std::move(base)),
      method_(method), base_(class_.make()) {}

std::string LowRankCore::prefix() const { return c10::str("shoestring::optim::", method_.name, ": "); }

void LowRankCore::expect(bool good, const char* option, const std::string& expected,
                         const std::string& received) const {
  TORCH_CHECK(good, prefix(), option, ": expected ", expected, ", received ", received);
}

bool LowRankCore::is_left(int64_t rows, int64_t columns, const LowRankOptions&) const {
  return rows <= columns;
}

void LowRankCore::add(const OptimizerParamGroup& group, const LowRankOptions& o) {
  expect(!o.rank || *o.rank >= 1, "rank", "none or a number of at least 1", c10::str(o.rank.value_or(0)));
  expect(o.update_proj_gap >= 1, "update_proj_gap", "a number of at least 1", c10::str(o.update_proj_gap));
  expect(o.scale > 0, "scale", "a number above 0", c10::str(o.scale));
  check(o);
  auto options = (group.has_options() ? group.options() : *defaults_).clone();
  expect(class_.fits(*options), "options",
         c10::str("shoestring::optim::", class_.name, "Options in every group"),
         "the options of another optimizer");
  const double decay = class_.weight_decay(*options);
  expect(!o.rank || decay == 0 || !class_.decay_is_a_penalty, "weight_decay",
         c10::str("0 with ", class_.name, ", where it is an L2 penalty (or no rank)"), c10::str(decay));
  const std::string rounding = class_.weight_rounding(*options);
  expect(!o.rank || rounding == "nearest", "weight_rounding", "\"nearest\" (or no rank)",
         "\"" + rounding + "\"");

  Group added{o, {}, {}};
  // Index of the next parameter in the optimizer. It is hashed into the parameter's seed, so that no two
  // parameters get the same random numbers.
  int64_t number = 0;
  for (const auto& g : groups_) number += static_cast<int64_t>(g.plain.size() + g.projected.size());
  std::vector<Tensor> low;
  for (const Tensor& p : group.params()) {
    const int64_t own = number++;
    const bool matrix = o.rank && p.dim() > 1 && p.numel() > 0;
    const int64_t rows = matrix ? p.size(0) : 0, columns = matrix ? p.numel() / rows : 0;
    const bool left = is_left(rows, columns, o);
    if (!matrix || *o.rank > (left ? rows : columns)) {
      added.plain.push_back(p);
      continue;
    }
    const auto type = p.scalar_type();
    expect(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, "params", "fp32, bf16 or fp16",
           c10::str(type));
    low.push_back(hollow({left ? *o.rank : rows, left ? columns : *o.rank}, p).detach().requires_grad_());
    added.projected.push_back({p, low.back(), left, {}, 0, mix({o.seed, own})});
  }
  Optimizer::add_param_group(group);
  param_groups_.back().set_options(options->clone());
  try {
    class_.add(*base_, {added.plain, options->clone()});
    make_virtual(*options);
    class_.add(*base_, {low, std::move(options)});
  } catch (...) {
    param_groups_.pop_back();
    throw;
  }
  groups_.push_back(std::move(added));
}

void LowRankCore::set_max_grad_norm(std::optional<double> max_grad_norm) {
  expect(!max_grad_norm || *max_grad_norm > 0, "max_grad_norm", "a number above 0, or none",
         c10::str(max_grad_norm.value_or(0)));
  max_grad_norm_ = max_grad_norm;
}

// Computes the norm of all gradients. Returns the factor by which clipping multiplies the gradients, or an
// undefined tensor without clipping.
Tensor LowRankCore::clip_coef() {
  grad_norm_ = Tensor();
  if (!max_grad_norm_) return {};
  std::vector<Tensor> grads;
  for (auto& group : param_groups_) {
    for (const auto& p : group.params()) {
      if (p.grad().defined()) grads.push_back(p.grad());
    }
  }
  if (grads.empty()) return {};
  grad_norm_ = total_norm(grads);
  return detail::clip_coef(grad_norm_, *max_grad_norm_);
}

void LowRankCore::make_virtual(OptimizerOptions& options) const {
  // Weight decay applies to the parameter itself, not to its low-rank stand-in.
  class_.weight_decay(options) = 0;
  if (method_.unit_lr) options.set_lr(1);
}

// Copies the options of all parameter groups to the base optimizer. Learning rate schedulers and users change
// only the options of the optimizer that wraps the base.
void LowRankCore::update_base_options() const {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    auto options = param_groups_[g].options().clone();
    base_->param_groups()[2 * g].set_options(options->clone());
    make_virtual(*options);
    base_->param_groups()[2 * g + 1].set_options(std::move(options));
  }
}

// Raises if the state of the base optimizer is offloaded. An offloaded step that fails is finished by a
// second call with the same gradients, but the projected gradients would be gone.
void LowRankCore::refuse_offload() const {
  const auto* base = dynamic_cast<const LowMemoryOptimizer*>(base_.get());
  const std::string where = base == nullptr ? "" : Access::core(*base).offload;
  expect(where.empty(), "base", "an optimizer whose state lies on the device; call set_offload(std::nullopt)",
         "set_offload(\"" + where + "\")");
}

Tensor LowRankCore::step(LossClosure closure) {
  refuse_offload();
  Tensor loss;
  if (closure != nullptr) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  torch::NoGradGuard no_grad;
  const Tensor clip = clip_coef();
  update_base_options();

  // Also after an exception, the guard restores the gradients of unprojected parameters and frees the memory
  // of the low-rank stand-ins for projected parameters.
  std::vector<std::pair<Tensor, Tensor>> given;
  const auto give_back = [&](void*) {
    for (auto& [p, grad] : given) p.mutable_grad() = grad;
    for (auto& group : groups_) {
      for (auto& p : group.projected) {
        p.low.mutable_grad() = Tensor();
        p.low.set_data(hollow(p.low.sizes(), p.param));
      }
    }
  };
  const std::unique_ptr<void, decltype(give_back)> guard(this, give_back);
  for (auto& group : groups_) {
    for (auto& p : group.projected) {
      const Tensor& whole = p.param.grad();
      if (!whole.defined()) continue;
      const Tensor low_grad = down(p, whole.flatten(1), group.options);
      if (clip.defined()) low_grad.mul_(clip.to(low_grad.device()));
      p.low.set_data(at::zeros_like(low_grad));
      p.low.mutable_grad() = low_grad;
    }
    if (!clip.defined()) continue;
    for (auto& p : group.plain) {
      if (!p.grad().defined()) continue;
      given.emplace_back(p, p.grad());
      p.mutable_grad() = (p.grad() * clip.to(p.device())).to(p.grad().scalar_type());
    }
  }
  base_->step();
  for (size_t g = 0; g < groups_.size(); ++g) {
    auto options = param_groups_[g].options().clone();
    for (auto& p : groups_[g].projected) {
      if (!p.low.grad().defined()) continue;
      up(p, clip.defined() ? clip.to(p.param.device()) : clip, groups_[g].options, options->get_lr(),
         class_.weight_decay(*options), class_.maximize(*options));
    }
  }
  return loss;
}

Tensor LowRankCore::kept(const Tensor& param) const {
  for (const auto& group : groups_) {
    for (const auto& p : group.projected) {
      if (p.param.is_same(param)) return p.kept;
    }
  }
  return {};
}

void LowRankCore::save(OutputArchive& archive) const {
  archive.write("format_version", c10::IValue(kLowRankFormatVersion));
  archive.write("optimizer", c10::IValue(c10::str(method_.name, " of ", class_.name)));
  update_base_options();
  OutputArchive base(archive.compilation_unit());
  base_->save(base);
  archive.write("base", base);
  archive.write("groups", c10::IValue(static_cast<int64_t>(groups_.size())));
  for (size_t g = 0; g < groups_.size(); ++g) {
    OutputArchive group(archive.compilation_unit());
    const auto& o = groups_[g].options;
    group.write("rank", c10::IValue(o.rank.value_or(0)));
    group.write("update_proj_gap", c10::IValue(o.update_proj_gap));
    group.write("scale", c10::IValue(o.scale));
    group.write(method_.kind, c10::IValue(o.kind));
    group.write("projected", c10::IValue(static_cast<int64_t>(groups_[g].projected.size())));
    for (size_t i = 0; i < groups_[g].projected.size(); ++i) {
      const auto& p = groups_[g].projected[i];
      const std::string key = std::to_string(i);
      group.write("seed" + key, c10::IValue(p.seed));
      group.write("age" + key, c10::IValue(p.age));
      if (p.kept.defined()) group.write(method_.kept + key, p.kept, /*is_buffer=*/true);
    }
    archive.write("group" + std::to_string(g), group);
  }
}

void LowRankCore::load(InputArchive& archive) {
  c10::IValue version, optimizer;
  const bool named = archive.try_read("format_version", version) && archive.try_read("optimizer", optimizer);
  const std::string expected = c10::str(method_.name, " of ", class_.name);
  expect(named && version.toInt() == kLowRankFormatVersion && optimizer.toStringRef() == expected, "load",
         c10::str("an archive of ", expected, ", format_version ", kLowRankFormatVersion),
         named ? c10::str(optimizer.toStringRef(), "'s, format_version ", version.toInt()) : "another one");
  const int64_t count = read_value(archive, "groups").toInt();
  expect(count == static_cast<int64_t>(groups_.size()), "load", c10::str(groups_.size(), " groups"),
         c10::str(count));
  std::vector<Group> loaded = groups_;
  for (size_t g = 0; g < groups_.size(); ++g) {
    InputArchive group;
    archive.read("group" + std::to_string(g), group);
    auto& o = loaded[g].options;
    const bool same =
        read_value(group, "rank").toInt() == o.rank.value_or(0) &&
        read_value(group, method_.kind).toStringRef() == o.kind &&
        read_value(group, "projected").toInt() == static_cast<int64_t>(loaded[g].projected.size());
    expect(same, "load",
           c10::str("rank ", o.rank.value_or(0), ", ", method_.kind, " \"", o.kind, "\" and ",
                    loaded[g].projected.size(), " projected parameters in group ", g),
           "others");
    o.update_proj_gap = read_value(group, "update_proj_gap").toInt();
    o.scale = read_value(group, "scale").toDouble();
    for (size_t i = 0; i < loaded[g].projected.size(); ++i) {
      auto& p = loaded[g].projected[i];
      const std::string key = std::to_string(i);
      p.seed = read_value(group, "seed" + key).toInt();
      p.age = read_value(group, "age" + key).toInt();
      Tensor kept;
      p.kept = Tensor();
      if (!group.try_read(method_.kept + key, kept, /*is_buffer=*/true)) continue;
      const auto [type, shape] = kept_as(p, o);
      expect(kept.scalar_type() == type && kept.sizes() == shape, "load",
             c10::str(method_.kept, " ", type, " ", at::IntArrayRef(shape)),
             c10::str(kept.scalar_type(), " ", kept.sizes()));
      p.kept = kept.to(p.param.device());
    }
  }
  InputArchive base;
  archive.read("base", base);
  base_->load(base);
  groups_ = std::move(loaded);
  for (size_t g = 0; g < groups_.size(); ++g) {
    param_groups_[g].set_options(base_->param_groups()[2 * g].options().clone());
  }
}

}  // namespace shoestring::optim::detail
