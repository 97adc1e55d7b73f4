#include "optim/core/saved.h"

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "optim/core/split_state.h"

namespace shoestring::optim {

using namespace detail;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

void detail::restore(LowMemoryOptimizer& optimizer, Saved saved) {
  Core& core = Access::core(optimizer);
  const char* name = core.name();
  auto& groups = optimizer.param_groups();
  expect(saved.groups.size() == groups.size(), name, "load", c10::str(groups.size(), " groups of parameters"),
         saved.groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    auto& [any, states] = saved.groups[g];
    const auto& options = static_cast<const LowMemoryOptions&>(*any);
    const auto& params = groups[g].params();
    Access::check(options, core.label);
    expect(states.size() == params.size(), name, "load", c10::str(params.size(), " parameters in group ", g),
           states.size());
    for (size_t i = 0; i < params.size(); ++i) {
      if (states[i].tensors().empty()) continue;
      const SplitParameter* split = split_of(params[i]);
      if (split != nullptr && !split->begins.empty() && !saved.has_parts)
        states[i] = part_of_state(Access::rule(options), kind_of(params[i], options), states[i], *split);
      if (!core.ranks || !saved.has_parts)
        check_state(Access::rule(options), states[i], params[i], kind_of(params[i], options));
    }
  }
  const Tensor& norm = saved.grad_norm;
  expect(!norm.defined() || (norm.dim() == 0 && norm.scalar_type() == at::kFloat), name, "load",
         "grad_norm as one fp32 number",
         norm.defined() ? c10::str(norm.sizes(), " of ", norm.scalar_type()) : "none");
  at::NoGradGuard no_grad;
  core.forget();
  if (core.step_in_backward) core.clipping.norm = saved.grad_norm;
  optimizer.state().clear();
  for (size_t g = 0; g < groups.size(); ++g) {
    Access::assign(groups[g].options(), *saved.groups[g].options);
    bool any = false;
    for (size_t i = 0; i < groups[g].params().size(); ++i) {
      ParamState& state = saved.groups[g].states[i];
      if (state.tensors().empty()) continue;
      any = true;
      optimizer.state()[groups[g].params()[i].unsafeGetTensorImpl()] =
          std::make_unique<ParamState>(std::move(state));
    }
    if (any) core.layout(g, saved.has_parts);
  }
}

const Tensor& ParamState::operator[](const std::string& name) const {
  const auto entry = tensors_.find(name);
  if (entry != tensors_.end()) return entry->second;
  std::string names;
  for (const auto& [other, tensor] : tensors_) names += (names.empty() ? "" : ", ") + other;
  TORCH_CHECK(false, "ParamState: expected one of ", names, ", received ", name);
}

// Writes copies of the state tensors. The tensors are views of an arena, and an archive would write the whole
// arena for each view.
void ParamState::serialize(OutputArchive& archive) const {
  for (const auto& [name, tensor] : tensors_) archive.write(name, tensor.clone(), /*is_buffer=*/true);
}

void ParamState::serialize(InputArchive& archive) {
  for (const std::string& name : archive.keys()) archive.read(name, tensors_[name], /*is_buffer=*/true);
}

void LowMemoryOptimizer::save(OutputArchive& archive) const {
  const auto alone = core_->lock();
  core_->settle();
  const WholeState whole(*core_);
  archive.write("format_version", c10::IValue(kFormatVersion));
  archive.write("optimizer", c10::IValue(std::string(core_->name())));
  if (core_->step_in_backward && grad_norm().defined())
    archive.write("grad_norm", grad_norm(), /*is_buffer=*/true);
  torch::optim::serialize<ParamState, LowMemoryOptions>(archive, *this);
}

// LibTorch's archives identify parameters, and their state, by the addresses that the parameters had when
// they were saved.
void LowMemoryOptimizer::load(InputArchive& archive) {
  const auto alone = core_->lock();
  c10::IValue version, optimizer;
  const bool ours = archive.try_read("format_version", version) && archive.try_read("optimizer", optimizer);
  const char* name = core_->name();
  expect(ours && version.toInt() == kFormatVersion && optimizer.toStringRef() == name, name, "load",
         c10::str("an archive of this optimizer, format_version ", kFormatVersion),
         ours ? c10::str(optimizer.toStringRef(), "'s, format_version ", version.toInt()) : "another one");
  Saved saved;
  archive.try_read("grad_norm", saved.grad_norm, /*is_buffer=*/true);
  InputArchive states, groups;
  archive.read("state", states);
  archive.read("param_groups", groups);
  Tensor size;
  groups.read("param_groups/size", size);
  for (int64_t g = 0; g < size.item<int64_t>(); ++g) {
    InputArchive group, options;
    groups.read("param_groups/" + std::to_string(g), group);
    group.read("options", options);
    Saved::Group& to = saved.groups.emplace_back();
    to.options = defaults_->clone();
    to.options->serialize(options);
    Tensor count;
    group.read("params/size", count);
    for (int64_t i = 0; i < count.item<int64_t>(); ++i) {
      c10::IValue address;
      group.read("params/" + std::to_string(i), address);
      InputArchive state;
      ParamState& entries = to.states.emplace_back();
      if (states.try_read(address.toStringRef(), state)) entries.serialize(state);
    }
  }
  restore(*this, std::move(saved));
}

}  // namespace shoestring::optim
