#include <map>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/serialize/archive.h>

#include <shoestring/optim/wrappers.h>

#include "optim/core/core.h"
#include "optim/split/split_params.h"
#include "optim/wrappers/low_rank_step.h"

namespace shoestring::optim::detail {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr int64_t kLowRankFormatVersion = 1;

c10::IValue read_value(InputArchive& archive, const std::string& name) {
  c10::IValue value;
  archive.read(name, value);
  return value;
}

}  // namespace

LowRankCore::LowRankCore(const Method& method, BaseClass base, std::unique_ptr<OptimizerOptions> defaults)
    : Optimizer(std::vector<OptimizerParamGroup>(), std::move(defaults)), class_(std::move(base)),
      step_(std::make_shared<LowRankStep>(method, method.name)), base_(class_.make()) {}

void LowRankCore::expect(bool good, const char* option, const std::string& expected,
                         const std::string& received) const {
  detail::expect(good, step_->name, option, expected, received);
}

void LowRankCore::add(const OptimizerParamGroup& group, const LowRankOptions& o) {
  const Method& method = step_->method;
  expect(!o.rank || *o.rank >= 1, "rank", "none or a number of at least 1", c10::str(o.rank.value_or(0)));
  expect(o.update_proj_gap >= 1, "update_proj_gap", "a number of at least 1", c10::str(o.update_proj_gap));
  expect(o.scale > 0, "scale", "a number above 0", c10::str(o.scale));
  std::string kinds;
  bool known = false;
  for (size_t i = 0; i < method.kinds.size(); ++i) {
    const char* between = i == 0 ? "" : i + 1 == method.kinds.size() ? " or " : ", ";
    kinds += c10::str(between, "\"", method.kinds[i], "\"");
    known |= o.kind == method.kinds[i];
  }
  expect(known, method.kind, kinds, "\"" + o.kind + "\"");
  auto options = (group.has_options() ? group.options() : *defaults_).clone();
  expect(class_.fits(*options), "options", class_.name + std::string("Options in every group"),
         "the options of another optimizer");
  const double decay = class_.weight_decay(*options);
  expect(!o.rank || decay == 0 || !class_.decay_is_a_penalty, "weight_decay",
         c10::str("0 with ", class_.name, ", where it is an L2 penalty (or no rank)"), c10::str(decay));
  const std::string rounding = class_.weight_rounding(*options);
  expect(!o.rank || rounding == "nearest", "weight_rounding", "\"nearest\" (or no rank)",
         "\"" + rounding + "\"");

  for (const Tensor& p : group.params()) {
    const SplitParameter* split = split_of(p);
    expect(split == nullptr || !split->begins.empty(), "params",
           "parameters that are split by rows over one dimension of their mesh",
           "one that is split otherwise");
  }

  Optimizer::add_param_group(group);
  param_groups_.back().set_options(options->clone());
  const std::vector<Tensor> lows = step_->add(group.params(), o);
  try {
    std::vector<Tensor> low;
    for (size_t i = 0; i < lows.size(); ++i) {
      if (!lows[i].defined()) continue;
      const auto type = group.params()[i].scalar_type();
      expect(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, "params", "fp32, bf16 or fp16",
             c10::str(type));
      low.push_back(lows[i]);
    }
    class_.add(*base_, {step_->groups.back().plain, options->clone()});
    make_virtual(*options);
    class_.add(*base_, {low, std::move(options)});
  } catch (...) {
    step_->groups.pop_back();
    param_groups_.pop_back();
    throw;
  }
}

void LowRankCore::set_max_grad_norm(std::optional<double> max_grad_norm) {
  expect(!max_grad_norm || *max_grad_norm > 0, "max_grad_norm", "a number above 0, or none",
         c10::str(max_grad_norm.value_or(0)));
  max_grad_norm_ = max_grad_norm;
}

void LowRankCore::make_virtual(OptimizerOptions& options) const {
  // Weight decay applies to the parameter itself, not to its low-rank stand-in.
  class_.weight_decay(options) = 0;
  if (step_->method.unit_lr) options.set_lr(1);
}

// Copies the options of all parameter groups to the base optimizer and to the step. Learning rate schedulers
// and users change only the options of the optimizer that wraps the base.
void LowRankCore::update_base_options() const {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    auto options = param_groups_[g].options().clone();
    step_->groups[g].base = {options->get_lr(), {}, class_.weight_decay(*options), class_.maximize(*options)};
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
  update_base_options();
  const auto release = [](LowRankStep* step) { step->release(); };
  const std::unique_ptr<LowRankStep, decltype(release)> guard(step_.get(), release);
  grad_norm_ = step_->begin(max_grad_norm_);
  base_->step();
  step_->finish();
  return loss;
}

Tensor LowRankCore::kept(const Tensor& param) const {
  for (const auto& group : step_->groups) {
    for (const auto& p : group.projected) {
      if (p.param.is_same(param)) return p.kept;
    }
  }
  return {};
}

void LowRankCore::save(OutputArchive& archive) const {
  const Method& method = step_->method;
  archive.write("format_version", c10::IValue(kLowRankFormatVersion));
  archive.write("optimizer", c10::IValue(c10::str(method.name, " of ", class_.name)));
  update_base_options();
  OutputArchive base(archive.compilation_unit());
  base_->save(base);
  archive.write("base", base);
  archive.write("groups", c10::IValue(static_cast<int64_t>(step_->groups.size())));
  for (size_t g = 0; g < step_->groups.size(); ++g) {
    OutputArchive group(archive.compilation_unit());
    const auto& o = step_->groups[g].options;
    group.write("rank", c10::IValue(o.rank.value_or(0)));
    group.write("update_proj_gap", c10::IValue(o.update_proj_gap));
    group.write("scale", c10::IValue(o.scale));
    group.write(method.kind, c10::IValue(o.kind));
    group.write("projected", c10::IValue(static_cast<int64_t>(step_->groups[g].projected.size())));
    for (size_t i = 0; i < step_->groups[g].projected.size(); ++i) {
      const auto& p = step_->groups[g].projected[i];
      const std::string key = std::to_string(i);
      group.write("seed" + key, c10::IValue(p.seed));
      group.write("age" + key, c10::IValue(p.age));
      if (p.kept.defined()) group.write(method.kept + key, p.kept, /*is_buffer=*/true);
    }
    archive.write("group" + std::to_string(g), group);
  }
}

void LowRankCore::load(InputArchive& archive) {
  const Method& method = step_->method;
  c10::IValue version, optimizer;
  const bool named = archive.try_read("format_version", version) && archive.try_read("optimizer", optimizer);
  const std::string expected = c10::str(method.name, " of ", class_.name);
  expect(named && version.toInt() == kLowRankFormatVersion && optimizer.toStringRef() == expected, "load",
         c10::str("an archive of ", expected, ", format_version ", kLowRankFormatVersion),
         named ? c10::str(optimizer.toStringRef(), "'s, format_version ", version.toInt()) : "another one");
  const int64_t count = read_value(archive, "groups").toInt();
  expect(count == static_cast<int64_t>(step_->groups.size()), "load",
         c10::str(step_->groups.size(), " groups"), c10::str(count));
  std::vector<LowRankStep::Group> loaded = step_->groups;
  for (size_t g = 0; g < step_->groups.size(); ++g) {
    InputArchive group;
    archive.read("group" + std::to_string(g), group);
    auto& o = loaded[g].options;
    const bool same =
        read_value(group, "rank").toInt() == o.rank.value_or(0) &&
        read_value(group, method.kind).toStringRef() == o.kind &&
        read_value(group, "projected").toInt() == static_cast<int64_t>(loaded[g].projected.size());
    expect(same, "load",
           c10::str("rank ", o.rank.value_or(0), ", ", method.kind, " \"", o.kind, "\" and ",
                    loaded[g].projected.size(), " projected parameters in group ", g),
           "others");
    o.update_proj_gap = read_value(group, "update_proj_gap").toInt();
    o.scale = read_value(group, "scale").toDouble();
    for (size_t i = 0; i < loaded[g].projected.size(); ++i) {
      auto& p = loaded[g].projected[i];
      const std::string key = std::to_string(i);
      p.seed = read_value(group, "seed" + key).toInt();
      p.age = read_value(group, "age" + key).toInt();
      Tensor saved;
      p.kept = Tensor();
      if (!group.try_read(method.kept + key, saved, /*is_buffer=*/true)) continue;
      const auto [type, shape] = method.kept_as(p, o);
      expect(saved.scalar_type() == type && saved.sizes() == shape, "load",
             c10::str(method.kept, " ", type, " ", at::IntArrayRef(shape)),
             c10::str(saved.scalar_type(), " ", saved.sizes()));
      p.kept = saved.to(p.param.device());
    }
  }
  InputArchive base;
  archive.read("base", base);
  base_->load(base);
  step_->groups = std::move(loaded);
  for (size_t g = 0; g < step_->groups.size(); ++g) {
    param_groups_[g].set_options(base_->param_groups()[2 * g].options().clone());
  }
}

}  // namespace shoestring::optim::detail
