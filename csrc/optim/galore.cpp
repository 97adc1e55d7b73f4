#include <ATen/Functions.h>
#include <shoestring/optim_wrappers.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <map>

#include "optim/subspace.h"

namespace shoestring::optim::detail {
namespace {

using at::Tensor;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr int64_t kFormatVersion = 1;
constexpr const char* kPrefix = "shoestring::optim::GaLore: ";

bool is_left(const Tensor& p, const GaLoreOptions& o) {
  return o.projection() == "left" || (o.projection() == "auto" && p.size(0) <= p.numel() / p.size(0));
}

bool is_projected(const Tensor& p, const GaLoreOptions& o) {
  if (!o.rank() || p.dim() < 2 || p.numel() == 0) return false;
  return *o.rank() <= (is_left(p, o) ? p.size(0) : p.numel() / p.size(0));
}

// Its shape without its memory: what a virtual parameter is between steps.
Tensor hollow(at::IntArrayRef sizes, const Tensor& like) {
  return at::zeros({}, like.options().dtype(at::kFloat).requires_grad(false)).expand(sizes);
}

c10::IValue read(InputArchive& archive, const std::string& name) {
  c10::IValue value;
  archive.read(name, value);
  return value;
}

}  // namespace

GaLoreCore::GaLoreCore(BaseClass base, std::unique_ptr<OptimizerOptions> defaults, GaLoreOptions galore)
    : Optimizer(std::vector<OptimizerParamGroup>(), std::move(defaults)),
      class_(std::move(base)),
      galore_defaults_(std::move(galore)),
      base_(class_.make()) {}

void GaLoreCore::add_param_group(const OptimizerParamGroup& group, const GaLoreOptions& o) {
  TORCH_CHECK(!o.rank() || *o.rank() >= 1, kPrefix,
              "rank: expected none or a number of at least 1, received ", o.rank().value_or(0));
  TORCH_CHECK(o.update_proj_gap() >= 1, kPrefix,
              "update_proj_gap: expected a number of at least 1, received ", o.update_proj_gap());
  TORCH_CHECK(o.scale() > 0, kPrefix, "scale: expected a number above 0, received ", o.scale());
  TORCH_CHECK(o.projection() == "auto" || o.projection() == "left" || o.projection() == "right", kPrefix,
              "projection: expected \"auto\", \"left\" or \"right\", received \"", o.projection(), "\"");
  auto options = (group.has_options() ? group.options() : *defaults_).clone();
  TORCH_CHECK(class_.fits(*options), kPrefix, "options: expected shoestring::optim::", class_.name,
              "Options in every group, received those of another optimizer");
  double& decay = class_.weight_decay(*options);
  TORCH_CHECK(!o.rank() || decay == 0 || !class_.decay_is_a_penalty, kPrefix,
              "weight_decay: expected 0 with ", class_.name,
              ", where it is an L2 penalty (or no rank), received ", decay);

  TORCH_CHECK(!o.rank() || class_.weights(*options) == "plain", kPrefix,
              "weights: expected \"plain\" (or no rank), received \"", class_.weights(*options), "\"");
  Group added{o, {}, {}};
  int64_t number = 0;  // of a parameter, which tells its random numbers from the others'
  for (const auto& g : groups_) number += static_cast<int64_t>(g.plain.size() + g.projected.size());
  std::vector<Tensor> low;
  for (const Tensor& p : group.params()) {
    ++number;
    if (!is_projected(p, o)) {
      added.plain.push_back(p);
      continue;
    }
    const auto type = p.scalar_type();
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, kPrefix,
                "params: expected fp32, bf16 or fp16, received ", type);
    const bool left = is_left(p, o);
    const int64_t columns = p.numel() / p.size(0);
    low.push_back(
        hollow({left ? *o.rank() : p.size(0), left ? columns : *o.rank()}, p).detach().requires_grad_());
    added.projected.push_back({p, low.back(), left, {}, 0, mix(o.seed(), number)});
  }
  Optimizer::add_param_group(group);
  param_groups_.back().set_options(options->clone());
  try {
    class_.add(*base_, {added.plain, options->clone()});
    decay = 0;
    class_.add(*base_, {low, std::move(options)});
  } catch (...) {
    param_groups_.pop_back();
    throw;
  }
  groups_.push_back(std::move(added));
}

void GaLoreCore::set_max_grad_norm(std::optional<double> max_grad_norm) {
  TORCH_CHECK(!max_grad_norm || *max_grad_norm > 0, kPrefix,
              "max_grad_norm: expected a number above 0, or none, received ", max_grad_norm.value_or(0));
  max_grad_norm_ = max_grad_norm;
}

// An undefined tensor where nothing is clipped. Norms are fp32 also for 16-bit gradients; nothing waits for a
// device.
Tensor GaLoreCore::clip_coef() {
  grad_norm_ = Tensor();
  if (!max_grad_norm_) return {};
  std::vector<Tensor> norms;
  for (auto& group : param_groups_) {
    std::map<at::ScalarType, std::vector<Tensor>> grads;
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

// Schedules and people change the options of this optimizer's groups.
void GaLoreCore::update_base_options() const {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    auto options = param_groups_[g].options().clone();
    base_->param_groups()[2 * g].set_options(options->clone());
    class_.weight_decay(*options) = 0;  // the whole weight decays
    base_->param_groups()[2 * g + 1].set_options(std::move(options));
  }
}

// A gradient that says nothing is waited out, with a random basis if there is none.
void GaLoreCore::renew(Projected& p, const Tensor& grad, const GaLoreOptions& o) {
  const double largest = at::linalg_vector_norm(grad, INFINITY).item<double>();
  const Tensor matrix = p.left ? grad : grad.mT();
  if (largest > 0 && std::isfinite(largest)) {
    Tensor basis = leading_vectors(matrix.to(at::kFloat), *o.rank(), p.seed);
    if (p.basis.defined()) {  // first moments do not flip with the arbitrary sign of a singular vector
      basis.mul_(at::where((basis * p.basis).sum(0) < 0, -1.0, 1.0).to(at::kFloat));
    }
    p.basis = basis.to(p.param.scalar_type());
    p.age = 0;
  } else if (!p.basis.defined()) {
    p.basis = random_basis(matrix.size(0), *o.rank(), p.seed, grad.device()).to(p.param.scalar_type());
    p.age = o.update_proj_gap();
  } else {
    return;
  }
  p.seed = mix(p.seed);
}

Tensor GaLoreCore::step(LossClosure closure) {
  Tensor loss;
  if (closure != nullptr) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  torch::NoGradGuard no_grad;
  const Tensor clip = clip_coef();
  update_base_options();

  // What the step borrows goes back also where it fails: plain gradients as they were, memory of virtual
  // parameters.
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
      const Tensor grad = whole.flatten(1);
      if (!p.basis.defined() || p.age >= group.options.update_proj_gap()) renew(p, grad, group.options);
      ++p.age;
      Tensor low_grad = project(grad, p.basis.to(at::kFloat), p.left);
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
    const double keep = 1 - options->get_lr() * class_.weight_decay(*options);
    for (auto& p : groups_[g].projected) {
      if (!p.low.grad().defined()) continue;
      const Tensor basis = p.basis.to(at::kFloat);
      add_product(p.param, keep, groups_[g].options.scale(), basis, p.low.detach(), p.left);
    }
  }
  return loss;
}

Tensor GaLoreCore::projection(const Tensor& param) const {
  for (const auto& group : groups_) {
    for (const auto& p : group.projected) {
      if (p.param.is_same(param)) return p.basis;
    }
  }
  return {};
}

void GaLoreCore::save(OutputArchive& archive) const {
  archive.write("format_version", c10::IValue(kFormatVersion));
  archive.write("optimizer", c10::IValue(std::string("GaLore of ") + class_.name));
  update_base_options();
  OutputArchive base(archive.compilation_unit());
  base_->save(base);
  archive.write("base", base);
  archive.write("groups", c10::IValue(static_cast<int64_t>(groups_.size())));
  for (size_t g = 0; g < groups_.size(); ++g) {
    OutputArchive group(archive.compilation_unit());
    const auto& o = groups_[g].options;
    group.write("rank", c10::IValue(o.rank().value_or(0)));
    group.write("update_proj_gap", c10::IValue(o.update_proj_gap()));
    group.write("scale", c10::IValue(o.scale()));
    group.write("projection", c10::IValue(o.projection()));
    group.write("projected", c10::IValue(static_cast<int64_t>(groups_[g].projected.size())));
    for (size_t i = 0; i < groups_[g].projected.size(); ++i) {
      const auto& p = groups_[g].projected[i];
      const std::string key = std::to_string(i);
      group.write("seed" + key, c10::IValue(p.seed));
      group.write("age" + key, c10::IValue(p.age));
      if (p.basis.defined()) group.write("projection" + key, p.basis, /*is_buffer=*/true);
    }
    archive.write("group" + std::to_string(g), group);
  }
}

void GaLoreCore::load(InputArchive& archive) {
  c10::IValue version, optimizer;
  const bool named = archive.try_read("format_version", version) && archive.try_read("optimizer", optimizer);
  const std::string expected = std::string("GaLore of ") + class_.name;
  TORCH_CHECK(
      named && version.toInt() == kFormatVersion && optimizer.toStringRef() == expected, kPrefix,
      "load: expected an archive of ", expected, ", format_version ", kFormatVersion, ", received ",
      named ? c10::str(optimizer.toStringRef(), "'s, format_version ", version.toInt()) : "another one");
  const int64_t count = read(archive, "groups").toInt();
  TORCH_CHECK(count == static_cast<int64_t>(groups_.size()), kPrefix, "load: expected ", groups_.size(),
              " groups, received ", count);
  std::vector<Group> loaded = groups_;
  for (size_t g = 0; g < groups_.size(); ++g) {
    InputArchive group;
    archive.read("group" + std::to_string(g), group);
    auto& o = loaded[g].options;
    const bool same = read(group, "rank").toInt() == o.rank().value_or(0) &&
                      read(group, "projection").toStringRef() == o.projection() &&
                      read(group, "projected").toInt() == static_cast<int64_t>(loaded[g].projected.size());
    TORCH_CHECK(same, kPrefix, "load: expected rank ", o.rank().value_or(0), ", projection \"",
                o.projection(), "\" and ", loaded[g].projected.size(), " projected parameters in group ", g,
                ", received others");
    o.update_proj_gap(read(group, "update_proj_gap").toInt()).scale(read(group, "scale").toDouble());
    for (size_t i = 0; i < loaded[g].projected.size(); ++i) {
      auto& p = loaded[g].projected[i];
      const std::string key = std::to_string(i);
      p.seed = read(group, "seed" + key).toInt();
      p.age = read(group, "age" + key).toInt();
      Tensor basis;
      p.basis = Tensor();
      if (!group.try_read("projection" + key, basis, /*is_buffer=*/true)) continue;
      const int64_t side = p.left ? p.param.size(0) : p.param.numel() / p.param.size(0);
      TORCH_CHECK(
          basis.sizes() == at::IntArrayRef({side, *o.rank()}) && basis.scalar_type() == p.param.scalar_type(),
          kPrefix, "load: projection: expected ", p.param.scalar_type(), " (", side, ", ", *o.rank(),
          "), received ", basis.scalar_type(), " ", basis.sizes());
      p.basis = basis.to(p.param.device());
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
