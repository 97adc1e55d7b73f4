#include <algorithm>

#include <ATen/Functions.h>

#include "offload/first_error.h"
#include "optim/core/core.h"
#include "optim/core/split_state.h"

namespace shoestring::optim::detail {

Core::Core(LowMemoryOptimizer& optimizer) : optimizer(&optimizer), label(name()) {}

const char* Core::name() const {
  return Access::rule(static_cast<const LowMemoryOptions&>(std::as_const(*optimizer).defaults())).name;
}

const LowMemoryOptions& Core::options(size_t group) const {
  return static_cast<const LowMemoryOptions&>(std::as_const(*optimizer).param_groups()[group].options());
}

const ParamState* Core::state(const Tensor& param) const {
  const auto entry = optimizer->state().find(param.unsafeGetTensorImpl());
  if (entry == optimizer->state().end()) return nullptr;
  const auto* ours = dynamic_cast<const ParamState*>(entry->second.get());
  TORCH_CHECK(ours != nullptr, label, ": state: expected a ParamState, ",
              "received the state of another optimizer");
  return ours;
}

std::vector<std::string> Core::names_of_state(size_t group, const Tensor& param) const {
  std::vector<std::string> names{"step"};
  for (const Part& part : parts(rule(group), kind_of(param, options(group)))) names.push_back(part.name);
  for (const Extra& extra : rule(group).extras) names.emplace_back(extra.name);
  return names;
}

Layout& Core::layout(size_t group, bool has_parts) {
  const auto& params = optimizer->param_groups()[group].params();
  const Rule& rule = this->rule(group);
  Layout& layout = layouts[group];
  size_t count = layout.absent.size();
  bool changed = false;
  for (const Arena& arena : layout.arenas) {
    arena.check_place(label);
    count += arena.params.size();
  }
  for (const Tensor& p : layout.absent) changed |= has_gradient(p);
  if (!changed && count == params.size()) return layout;
  TORCH_CHECK(!ranks || layout.arenas.empty(), label,
              ": step: expected the parameters that required gradients in the first step, among which ",
              "processes have split the state, received others");

  std::vector<Tensor> absent;
  // A gradient hook can step a parameter or accumulate its gradient at any time in backward. The state of
  // parameters with hooks must therefore exist before backward.
  const bool from_hooks = step_in_backward || (on_cpu() && (watches || !watched_.empty()));
  const auto by_kind = members(group, [&](const Tensor& p) {
    // Processes that split the state must agree on it, also if gradients are missing on some of them.
    const bool always = from_hooks || ranks.has_value();
    const bool belongs = state(p) != nullptr || has_gradient(p) || (always && p.requires_grad());
    if (!belongs) absent.push_back(p);
    return belongs;
  });
  bring_back();
  // The new arenas replace the old ones only at the end, so that an out-of-memory error changes nothing.
  Layout made{{}, std::move(absent)};
  std::vector<std::pair<Key, std::map<std::string, Tensor>>> states;
  for (const auto& [kind, same, numbers] : by_kind) {
    for (const Tensor& p : same) {
      if (state(p) != nullptr && !(ranks && has_parts)) check_state(rule, *state(p), p, kind);
    }
    Arena& arena =
        made.arenas.emplace_back(rule, kind, same, numbers, offload_of(kind.source), on_cpu(), ranks);
    for (size_t i = 0; i < arena.params.size(); ++i) {
      if (!arena.owns(i)) {
        states.emplace_back(arena.params[i].unsafeGetTensorImpl(), std::map<std::string, Tensor>());
        continue;
      }
      auto views = arena.views(rule, i);
      if (const ParamState* old = state(arena.params[i])) {
        arena.set_state(rule, i, old->tensors(), has_parts);
        for (const Extra& extra : rule.extras) {
          const Tensor& tensor = (*old)[extra.name];
          views[extra.name] = tensor.to(kind.device, tensor.scalar_type(), false, /*copy=*/true);
        }
      }
      for (const Extra& extra : rule.extras) {
        Tensor& tensor = views[extra.name];
        if (!tensor.defined()) tensor = at::zeros(extra.shape_of(arena.params[i]), arena.step.options());
      }
      states.emplace_back(arena.params[i].unsafeGetTensorImpl(), std::move(views));
    }
  }
  alone_.clear();  // drops the arenas of single parameters, which are views of the old arenas
  host.drop_buckets();
  ++layouts_made;
  for (auto& [key, views] : states) {
    if (views.empty()) {
      optimizer->state().erase(key);  // another process has it
    } else {
      optimizer->state()[key] = std::make_unique<ParamState>(std::move(views));
    }
  }
  return layout = std::move(made);
}

std::vector<Core::Members> Core::members(size_t group, c10::function_ref<bool(const Tensor&)> belongs) const {
  std::vector<Members> by_kind;
  int64_t number = 0;
  for (size_t g = 0; g < group; ++g) number += std::ssize(optimizer->param_groups()[g].params());
  for (const Tensor& p : optimizer->param_groups()[group].params()) {
    const int64_t param_number = number++;
    if (!belongs(p)) continue;
    Kind kind = kind_of(p, options(group));
    if (on_cpu()) kind.device = at::kCPU;
    kind.shard = shard_of(p);
    if (split_gradients != nullptr) kind.shard = {{split_gradients->group()}, 0, p.device().type()};
    auto same =
        std::find_if(by_kind.begin(), by_kind.end(), [&](const Members& m) { return m.kind == kind; });
    if (same == by_kind.end()) same = by_kind.insert(by_kind.end(), {kind, {}, {}});
    same->params.push_back(p);
    same->numbers.push_back(param_number);
  }
  return by_kind;
}

void Core::check_parts(size_t first, const char* option, const std::string& received) const {
  for (size_t g = first; g < optimizer->param_groups().size(); ++g) {
    for (const Tensor& p : optimizer->param_groups()[g].params()) {
      const SplitParameter* split = split_of(p);
      const bool is_alone = split == nullptr || split->begins.size() <= 2;  // where one rank begins and ends
      TORCH_CHECK_VALUE(is_alone || rule(g).takes_parts(), label, ": ", option,
                        ": expected none where processes have split the parameters, since the rule needs ",
                        "whole ones, received ", received, "; use AdamW, Lion or SGD");
    }
  }
}

void Core::reserve(size_t first) {
  // Each process takes the chunks of its own parts, so processes would wait for each other.
  if (!offload.empty()) check_parts(first, "offload", c10::str('"', offload, '"'));
  if (!streams()) return;
  std::map<c10::intrusive_ptr<offload::Offload>, int64_t> sizes;
  for (size_t g = first; g < optimizer->param_groups().size(); ++g) {
    for (const auto& [kind, params, numbers] :
         members(g, [](const Tensor& p) { return p.requires_grad(); })) {
      sizes[offload_of(kind.source)] += offloaded_bytes(rule(g), kind, params, numbers, ranks);
    }
  }
  for (const auto& [offload, size] : sizes) offload->reserve(size);
}

c10::intrusive_ptr<offload::Offload> Core::offload_of(at::Device device) {
  if (offload.empty()) return nullptr;
  auto& shared = offloads_[device];
  if (shared == nullptr) {
    shared = c10::make_intrusive<offload::Offload>(label + ": offload", offload, device);
  }
  return shared;
}

void Core::set_shard(Ranks all, GatherWeights gather, std::shared_ptr<SplitGradients> gradients) {
  expect(all.count > 0 && all.rank >= 0 && all.rank < all.count, label, "set_shard",
         "a rank from 0 to the number of ranks", c10::str(all.rank, " of ", all.count));
  const auto refuse = [&](bool good, const char* expected, const char* received) {
    expect(good, label, "set_shard", expected, received);
  };
  refuse(optimizer->state().empty(), "an optimizer before its first step", "one that has a state");
  refuse(!on_cpu(), "offload=\"stream\" or \"nvme:DIR\"", "\"cpu\"");
  refuse(!step_in_backward, "an optimizer without step_in_backward", "one with it");
  for (const auto& group : optimizer->param_groups()) {
    for (const Tensor& p : group.params()) {
      refuse(p.is_contiguous(), "contiguous parameters", "one that is not contiguous");
      refuse(split_of(p) == nullptr, "whole parameters", "parts of FullyShard, whose steps are split");
    }
  }
  ranks = std::move(all);
  try {
    if (streams()) set_offload(offload);  // reserves this process's part alone
  } catch (...) {
    ranks.reset();
    throw;
  }
  gather_weights = std::move(gather);
  split_gradients = std::move(gradients);
}

// Returns the parts that each process steps.
Core::Parts Core::parts_of(const std::vector<const Arena*>& arenas) const {
  Parts parts(static_cast<size_t>(ranks->count));
  for (const Arena* arena : arenas) {
    for (size_t process = 0; process < parts.size(); ++process) {
      for (ParameterPart& part : arena->parts_of(process)) parts[process].push_back(std::move(part));
    }
  }
  return parts;
}

std::vector<Core::OwnState> Core::own_states(size_t group) const {
  const auto& params = optimizer->param_groups()[group].params();
  std::unordered_map<Key, OwnState> known;
  const auto layout = layouts.find(group);
  if (ranks && layout != layouts.end()) {
    for (const Arena& arena : layout->second.arenas) {
      for (size_t i = 0; i < arena.params.size(); ++i) {
        OwnState own_state{arena.views(rule(group), i), arena.splits(rule(group), i)};
        for (const Extra& extra : rule(group).extras) {
          own_state.tensors[extra.name] =
              arena.owns(i) ? (*state(arena.params[i]))[extra.name] : at::empty({0}, arena.step.options());
        }
        known[arena.params[i].unsafeGetTensorImpl()] = std::move(own_state);
      }
    }
  }
  std::vector<OwnState> states;
  for (const Tensor& p : params) {
    OwnState& own_state = states.emplace_back(std::move(known[p.unsafeGetTensorImpl()]));
    if (!own_state.tensors.empty() || state(p) == nullptr) continue;
    own_state.tensors = state(p)->tensors();
    const SplitParameter* split = split_of(p);
    if (split == nullptr || split->begins.empty()) continue;
    for (const auto& [name, sizes] : whole_shapes(rule(group), kind_of(p, options(group)), *split)) {
      if (auto how = split_of_state(rule(group), name, sizes, *split))
        own_state.splits.emplace(name, std::move(*how));
    }
  }
  return states;
}

WholeState::WholeState(Core& core) : core_(core) {
  const at::NoGradGuard no_grad;
  std::decay_t<decltype(core.optimizer->state())> whole;
  bool any = false;
  for (size_t group = 0; group < core.optimizer->param_groups().size(); ++group) {
    std::vector<Core::OwnState> states = core.own_states(group);
    for (size_t i = 0; i < states.size(); ++i) {
      auto& [tensors, splits] = states[i];
      if (tensors.empty()) continue;
      any |= !splits.empty();
      for (const auto& [name, split] : splits) tensors[name] = gathered(tensors[name], split);
      const Tensor& param = core.optimizer->param_groups()[group].params()[i];
      whole[param.unsafeGetTensorImpl()] = std::make_unique<ParamState>(std::move(tensors));
    }
  }
  if (any) own_ = std::exchange(core.optimizer->state(), std::move(whole));
}

WholeState::~WholeState() {
  if (own_.has_value()) core_.optimizer->state() = std::move(*own_);
}

void Core::share_weights(const std::vector<const Arena*>& arenas) const {
  if (ranks.has_value()) gather_weights(parts_of(arenas));
}

void Core::expect_unsharded(const char* what) const {
  TORCH_CHECK(!ranks, label, ": ", what, ": expected an optimizer whose state is in this process, ",
              "received one whose state processes have split");
}

void Core::set_offload(const std::string& where) {
  const auto alone = lock();
  if (!optimizer->state().empty()) expect_unsharded("set_offload");
  expect(!ranks || where != "cpu", label, "set_offload",
         "\"stream\" or \"nvme:DIR\" where processes have split the steps", "\"cpu\"");
  settle();
  unfinished.end();
  const auto old = std::exchange(offloads_, decltype(offloads_)(offloads_.key_comp()));
  const std::string before = std::exchange(offload, where);
  layouts.clear();
  alone_.clear();
  host.drop_buckets();
  try {
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      for (const Tensor& p : optimizer->param_groups()[g].params()) offload_of(p.device());
    }
    reserve(0);
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      const auto& params = optimizer->param_groups()[g].params();
      if (std::any_of(params.begin(), params.end(), [&](const Tensor& p) { return state(p) != nullptr; }))
        layout(g);
    }
  } catch (...) {
    offloads_ = old;
    offload = before;
    layouts.clear();
    throw;
  }
}

int64_t Core::host_bytes() const {
  int64_t bytes = 0;
  for (const auto& [device, offload] : offloads_) bytes += offload->memory.bytes();
  return bytes;
}

void Core::replace_params(size_t group, const std::vector<Tensor>& params) {
  const auto alone = lock();
  auto& members = optimizer->param_groups()[group].params();
  if (params.size() != members.size()) {  // layout() finds the state of the parameters that stay
    members = params;
    alone_.clear();
    host.drop_buckets();
    return;
  }
  std::unordered_map<Key, Tensor> replaced;
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].is_same(members[i])) continue;
    replaced[members[i].unsafeGetTensorImpl()] = params[i];
    if (const SplitParameter* split = split_of(members[i])) set_split(params[i], SplitParameter(*split));
  }
  if (replaced.empty()) return;
  follow(optimizer->state(), replaced);
  sums.follow(replaced);
  host.follow(replaced);
  alone_.clear();
  host.drop_buckets();
  const auto replace = [&](Tensor& p) {
    const auto replacement = replaced.find(p.unsafeGetTensorImpl());
    if (replacement != replaced.end()) p = replacement->second;
  };
  if (const auto layout = layouts.find(group); layout != layouts.end()) {
    for (Tensor& p : layout->second.absent) replace(p);
    for (Arena& arena : layout->second.arenas)
      std::for_each(arena.params.begin(), arena.params.end(), replace);
  }
  std::for_each(members.begin(), members.end(), replace);
}

void Core::bring_back() {
  for (const auto& [group, layout] : layouts) {
    for (const Arena& arena : layout.arenas) {
      if (arena.offloaded != nullptr) arena.offloaded->finish();
    }
  }
}

void Core::forget() {
  const auto alone = lock();
  end_backward();
  offload::FirstError ignored;  // errors are ignored: they concern optimizer state that is dropped anyway
  ignored.guard([&] { host.drain(); });
  unfinished.forget();
  host.drop_buckets();
  host.forget_gradients();
  layouts.clear();
  alone_.clear();
  stepped_alone_.clear();
  sums.forget();
  clipping.in_backward.clear();
}

}  // namespace shoestring::optim::detail
