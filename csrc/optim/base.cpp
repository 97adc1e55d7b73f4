#include <algorithm>
#include <typeinfo>
#include <unordered_set>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "optim/core.h"

namespace shoestring::optim {

using namespace detail;

namespace detail {
namespace {

// A number as the operators take it.
std::optional<Tensor> number_on(at::Device device, const Tensor& t) {
  return some(t.defined() ? t.to(device, at::kFloat, /*non_blocking=*/!device.is_cpu()) : t);
}

}  // namespace

const char* Core::name() const {
  return Access::rule(static_cast<const LowMemoryOptions&>(std::as_const(*optimizer).defaults())).name;
}

const LowMemoryOptions& Core::options(size_t group) const {
  return static_cast<const LowMemoryOptions&>(std::as_const(*optimizer).param_groups()[group].options());
}

const ParamState* Core::state(const Tensor& param) const {
  const auto found = optimizer->state().find(param.unsafeGetTensorImpl());
  if (found == optimizer->state().end()) return nullptr;
  const auto* ours = dynamic_cast<const ParamState*>(found->second.get());
  TORCH_CHECK(ours != nullptr, "shoestring::optim::", name(), ": state: expected shoestring::optim::ParamState, ",
              "received that of another optimizer");
  return ours;
}

Layout& Core::layout(size_t group) {
  const auto& params = optimizer->param_groups()[group].params();
  const Rule& rule = this->rule(group);
  Layout& layout = layouts[group];
  size_t count = layout.absent.size();
  bool changed = false;
  for (const Arena& arena : layout.arenas) count += arena.params.size();
  for (const Tensor& p : layout.absent) changed |= has_gradient(p);
  if (!changed && count == params.size()) return layout;

  struct Members {
    Kind kind;
    std::vector<Tensor> params;
    std::vector<int64_t> numbers;
  };
  std::vector<Members> members;
  std::vector<Tensor> absent;
  int64_t number = 0;
  for (size_t g = 0; g < group; ++g) number += std::ssize(optimizer->param_groups()[g].params());
  for (const Tensor& p : params) {
    const int64_t own = number++;
    // What hooks are on may get a gradient or a sum that must not wait for state to be made.
    const bool from_hooks = step_in_backward || (on_cpu() && !watched_.empty());
    if (state(p) == nullptr && !has_gradient(p) && !(from_hooks && p.requires_grad())) {
      absent.push_back(p);
      continue;
    }
    Kind kind = kind_of(p, options(group));
    if (on_cpu()) kind.device = at::kCPU;
    if (state(p) != nullptr) check_state(rule, *state(p), p, kind);
    auto found = members.begin();
    while (found != members.end() && !(found->kind == kind)) ++found;
    if (found == members.end()) found = members.insert(found, {kind, {}, {}});
    found->params.push_back(p);
    found->numbers.push_back(own);
  }
  bring_back();
  alone_.clear();  // views of other arenas
  drop_buckets();
  layout = {{}, std::move(absent)};
  for (auto& [kind, same, numbers] : members) {
    const Arena& arena =
        layout.arenas.emplace_back(rule, kind, same, std::move(numbers), offload_of(kind.source), on_cpu());
    for (size_t i = 0; i < arena.params.size(); ++i) {
      auto views = arena.views(rule, i);
      if (const ParamState* old = state(arena.params[i])) {
        for (const auto& [name, tensor] : old->tensors()) {
          const auto view = views.find(name);
          if (view != views.end()) {
            view->second.copy_(tensor);
          } else {
            views[name] = tensor.to(kind.device);
          }
        }
      }
      for (const Extra& extra : rule.extra(arena.params[i])) {
        Tensor& tensor = views[extra.name];
        if (!tensor.defined()) tensor = at::zeros(extra.shape, arena.step.options());
      }
      optimizer->state()[arena.params[i].unsafeGetTensorImpl()] = std::make_unique<ParamState>(std::move(views));
    }
  }
  return layout;
}

void Core::step() {
  drain();
  if (step_in_backward) finish_backward();
  std::vector<Call> calls;
  if (unfinished_) {
    check_resumed();
    calls = unfinished_->first;
  } else {
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      const auto& params = optimizer->param_groups()[g].params();
      if (std::none_of(params.begin(), params.end(), [&](const Tensor& p) { return has_gradient(p); })) continue;
      for (Arena& arena : layout(g).arenas) calls.push_back({g, &arena, {}, {}});
    }
    for (Call& call : calls) gather(call);
  }
  find_inf(calls);
  const Tensor coefficient = clip(calls);
  if (streams() && !step_in_backward) unfinished_.emplace(calls, versions());
  for (const Call& call : calls) step_arena(call.group, *call.arena, call.grads, call.accumulated, coefficient);
  bring_back();
  for (const Call& call : calls) {
    if (call.arena->offloaded != nullptr) call.arena->commit();
  }
  unfinished_.reset();
  drop_sums();
}

c10::intrusive_ptr<offload::Offload> Core::offload_of(at::Device device) {
  if (offload.empty()) return nullptr;
  auto& found = offloads_[device];
  if (found == nullptr) {
    const std::string caller = c10::str("shoestring::optim::", name(), ": offload");
    found = c10::make_intrusive<offload::Offload>(caller, offload, device);
  }
  return found;
}

void Core::set_offload(const std::string& where) {
  drain();
  bring_back();
  const auto old = std::exchange(offloads_, decltype(offloads_)(offloads_.key_comp()));
  const std::string before = std::exchange(offload, where);
  layouts.clear();
  alone_.clear();
  drop_buckets();
  try {
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      const auto& params = optimizer->param_groups()[g].params();
      for (const Tensor& p : params) offload_of(p.device());
      if (std::any_of(params.begin(), params.end(), [&](const Tensor& p) { return state(p) != nullptr; })) layout(g);
    }
  } catch (...) {
    offloads_ = old;
    offload = before;
    layouts.clear();
    throw;
  }
}

void Core::bring_back() {
  for (const auto& [group, layout] : layouts) {
    for (const Arena& arena : layout.arenas) {
      if (arena.offloaded != nullptr) arena.offloaded->finish();
    }
  }
}

Core::Versions Core::versions() const {
  Versions found;
  for (const auto& group : optimizer->param_groups()) {
    for (const Tensor& p : group.params()) found.emplace_back(p.grad(), p.grad().defined() ? p.grad()._version() : 0);
  }
  return found;
}

void Core::check_resumed() const {
  const auto same = [](const auto& a, const auto& b) { return a.first.is_same(b.first) && a.second == b.second; };
  const Versions now = versions(), &before = unfinished_->second;
  TORCH_CHECK(std::equal(now.begin(), now.end(), before.begin(), before.end(), same), "shoestring::optim::", name(),
              ": step: expected the gradients of the step that failed, which this one finishes, received others; load "
              "saved state to go on without it");
}

void Core::step_arena(size_t group, Arena& arena, const std::vector<Tensor>& grads, const Tensor& accumulated,
                      const Tensor& clip_coef) {
  if (arena.host != nullptr) return step_on_host(group, arena, grads, accumulated, clip_coef);
  if (arena.offloaded == nullptr) return step_values(group, arena, grads, accumulated, clip_coef);
  arena.in_pieces(rule(group), grads, accumulated, [&](const Arena& piece, const auto& own, const Tensor& sums) {
    step_values(group, piece, own, sums, clip_coef);
  });
  if (!step_in_backward) arena.offloaded->finish();  // else the next parameter may need the same chunk
}

void Core::step_values(size_t group, const Arena& arena, const std::vector<Tensor>& grads, const Tensor& accumulated,
                       const Tensor& clip_coef) {
  const LowMemoryOptions& o = options(group);
  c10::List<std::optional<Tensor>> optional_grads;
  for (const Tensor& g : grads) optional_grads.push_back(some(g));
  NamedArguments arguments{{"params", arena.stepped_params()},
                           {"grads", optional_grads},
                           {"step", arena.step},
                           {"lr", o.get_lr()},
                           {"maximize", Access::maximize(o)},
                           {"grad_scale", number_on(arena.kind.device, grad_scale_)},
                           {"clip_coef", number_on(arena.kind.device, clip_coef)},
                           {"found_inf", number_on(arena.kind.device, found_inf_)},
                           {"accumulated", some(accumulated)},
                           {"stochastic_rounding", Access::weights(o) == "stochastic"},
                           {"seed", Access::seed(o)},
                           {"numbers", arena.numbers}};
  if (arena.part) {
    arguments.emplace_back("first_block", arena.part->first);
    arguments.emplace_back("blocks", arena.part->second);
  }
  for (const auto& [name, tensor] : arena.values) arguments.emplace_back(name, tensor);
  for (const Extra& extra : rule(group).extra(arena.params[0])) {
    std::vector<Tensor> tensors;
    for (const Tensor& p : arena.params) tensors.push_back((*state(p))[extra.name]);
    arguments.emplace_back(extra.name, std::move(tensors));
  }
  for (const Field& field : Access::own_fields(o)) {
    if (!field.of_operator) continue;
    for (auto& value : values(field)) arguments.push_back(std::move(value));
  }
  call_by_name(std::string("shoestring::") + rule(group).op, arguments);
}

}  // namespace detail

LowMemoryOptimizer::LowMemoryOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                                       std::unique_ptr<LowMemoryOptions> defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)),
      core_(std::make_shared<Core>(*this)) {
  Access::check(static_cast<const LowMemoryOptions&>(*defaults_));
  for (const auto& group : param_groups) add_param_group(group);
}

LowMemoryOptimizer::~LowMemoryOptimizer() = default;

LowMemoryOptimizer::LowMemoryOptimizer(LowMemoryOptimizer&& other) noexcept
    : Optimizer(std::move(other)), core_(std::move(other.core_)) {
  core_->optimizer = this;
}

LowMemoryOptimizer& LowMemoryOptimizer::operator=(LowMemoryOptimizer&& other) noexcept {
  Optimizer::operator=(std::move(other));
  core_ = std::move(other.core_);
  core_->optimizer = this;
  return *this;
}

void LowMemoryOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  const char* name = core_->name();
  if (group.has_options()) {
    TORCH_CHECK(typeid(group.options()) == typeid(*defaults_), "shoestring::optim::", name,
                ": options: expected shoestring::optim::", name,
                "Options in every group, received those of another optimizer");
    Access::check(static_cast<const LowMemoryOptions&>(group.options()));
  }
  const auto& options = static_cast<const LowMemoryOptions&>(group.has_options() ? group.options() : *defaults_);
  std::unordered_set<Key> seen;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const Tensor& p = group.params()[i];
    const auto type = p.scalar_type();
    const std::string which = c10::str("params[", i, "]");
    const bool half = type == at::kHalf && Access::weights(options) != "plain";
    expect(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, name, which.c_str(), "fp32, bf16 or fp16",
           type);
    expect(p.dim() == 2 || !Access::rule(options).takes_matrices_alone, name, which.c_str(),
           "a matrix (use shoestring::optim::AdamW for parameters of other shapes)", c10::str("shape ", p.sizes()));
    expect(!half, name, which.c_str(),
           "bf16 (or fp32, which it leaves as they are) with weights=\"" + Access::weights(options) + "\"", type);
    expect(seen.insert(p.unsafeGetTensorImpl()).second, name, which.c_str(), "each parameter once", "one again");
  }
  Optimizer::add_param_group(group);
  if (group.has_options()) param_groups_.back().set_options(group.options().clone());
  if (core_->step_in_backward) core_->watch(group.params());
}

Tensor LowMemoryOptimizer::step(LossClosure closure) {
  for (size_t g = 0; g < param_groups_.size(); ++g) Access::check_step(core_->options(g));
  Tensor loss;
  if (closure != nullptr) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  at::NoGradGuard no_grad;
  core_->step();
  return loss;
}

}  // namespace shoestring::optim
