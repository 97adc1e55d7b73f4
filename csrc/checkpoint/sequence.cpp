// Measures, plans and runs a sequence of functions within a memory budget
// (shoestring/checkpoint/checkpoint_sequence.h).

#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/checkpoint/checkpoint_sequence.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <unordered_set>
#include <utility>

#include "checkpoint/choices.h"
#include "checkpoint/hooks.h"
#include "checkpoint/kept_buffers.h"
#include "checkpoint/memory_meter.h"
#include "checkpoint/rng_state.h"
#include "core/device.h"

using at::Tensor;

namespace shoestring {
namespace {

using activations::Choice;
using activations::MemoryMeter;

constexpr int kRuns = 3;  // number of timed runs of each function, of which the quickest counts
// Minimum time, in seconds, that a plan assumes for a recomputation, even if a shorter time was measured. It
// keeps the plan from recomputing blocks if everything fits into the budget.
constexpr double kLeastExtra = 1e-6;

Tensor run(const Choice& choice, const BlockFunction& function, const Tensor& x, OffloadActivations* offload,
           const std::vector<Tensor>& buffers) {
  if (choice.offloaded && c10::GradMode::is_enabled()) {
    const auto scope = offload->scope();
    return run({choice.name, choice.recomputed, choice.keep, false}, function, x, nullptr, buffers);
  }
  if (!choice.recomputed) return function(x);
  return checkpoint(function, x, CheckpointOptions().keep(choice.keep).buffers(buffers));
}

// Returns a copy of `value` that is not a leaf of the autograd graph, so it is freed as soon as nothing uses
// it.
struct Source : torch::autograd::Function<Source> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& /*anchor*/, const Tensor& value) {
    return value.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {Tensor(), Tensor()};
  }
};

// While a GradientsAside lives, the gradients of all leaves of an autograd graph are replaced by zeros.
// Measured backward passes thus accumulate into existing gradients, as in training after the first
// micro-batch. The destructor restores the gradients.
class GradientsAside {
 public:
  void add(const Tensor& root) {
    std::vector<torch::autograd::Node*> open;
    if (root.grad_fn()) open.push_back(root.grad_fn().get());
    while (!open.empty()) {
      auto* node = open.back();
      open.pop_back();
      if (!seen_.insert(node).second) continue;
      if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
        Tensor variable = leaf->variable;
        before_.emplace_back(variable, variable.grad());
        variable.mutable_grad() = at::zeros_like(variable);
      }
      for (const auto& edge : node->next_edges()) {
        if (edge.is_valid()) open.push_back(edge.function.get());
      }
    }
    seen_.clear();
  }
  ~GradientsAside() {
    // A weight of two functions, such as an embedding that is also the output matrix, was added twice. Its
    // first entry has the gradient from before, so that entry is restored last.
    for (auto it = before_.rbegin(); it != before_.rend(); ++it) it->first.mutable_grad() = it->second;
  }

 private:
  std::unordered_set<torch::autograd::Node*> seen_;
  std::vector<std::pair<Tensor, Tensor>> before_;
};

struct Cost {
  double forward_seconds, backward_seconds;
  int64_t held, forward_bytes, backward_bytes;
};

double seconds_since(std::chrono::steady_clock::time_point began, const Tensor& x) {
  synchronize(x.device());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

Cost measure(const Choice& choice, const BlockFunction& function, const Tensor& input, bool differentiable,
             OffloadActivations* offload = nullptr) {
  const Tensor anchor = at::zeros({}, at::kFloat).set_requires_grad(true);
  const auto meter = c10::make_intrusive<MemoryMeter>();
  meter->begin(input.device());
  Cost cost{};
  Tensor x = differentiable ? Source::apply(anchor, input) : input.clone();
  auto began = std::chrono::steady_clock::now();
  // plan_sequential puts the buffers back after all measurements
  Tensor y = run(choice, function, x, offload, {});
  if (choice.offloaded) offload->mark(), offload->wait(0);
  cost.forward_seconds = seconds_since(began, input);
  cost.forward_bytes = meter->peak();
  if (y.requires_grad()) {
    const auto edge = torch::autograd::impl::gradient_edge(y);
    const int64_t before = meter->current();
    Tensor upstream = at::ones_like(y);
    const int64_t gradient = meter->current() - before;
    x.reset();
    y.reset();
    // The function may free what it allocated in an earlier call.
    cost.held = std::max<int64_t>(0, meter->current() - gradient);
    meter->reset_peak();
    began = std::chrono::steady_clock::now();
    torch::autograd::Engine::get_default_engine().execute({edge}, {std::move(upstream)}, /*keep_graph=*/false,
                                                          /*create_graph=*/false, /*accumulate_grad=*/true);
    cost.backward_seconds = seconds_since(began, input);
    cost.backward_bytes = meter->peak();
  }
  meter->end();
  return cost;
}

PlanBlock planned(const BlockFunction& function, const Tensor& x, bool differentiable,
                  OffloadActivations* offload) {
  PlanBlock block;
  Cost kept_cost{};
  int64_t least = 0;
  for (const Choice& choice : activations::choices()) {
    if (choice.offloaded) {
      if (offload == nullptr) continue;
      PlanChoice moved = block.choices[choice.recomputed ? 1 : 0];
      moved.name = choice.name;
      const int64_t stays = measure(choice, function, x, differentiable, offload).held;
      moved.link_bytes = std::max<int64_t>(0, std::exchange(moved.bytes, stays) - stays);
      block.choices.push_back(std::move(moved));
      continue;
    }
    // The first run of a measurement also makes lasting allocations, such as workspaces and caches, so its
    // times are not used.
    Cost cost = measure(choice, function, x, differentiable);
    for (int i = 0; i < kRuns; ++i) {
      const Cost again = measure(choice, function, x, differentiable);
      const double forward =
          i == 0 ? again.forward_seconds : std::min(cost.forward_seconds, again.forward_seconds);
      const double backward =
          i == 0 ? again.backward_seconds : std::min(cost.backward_seconds, again.backward_seconds);
      cost = again;
      cost.forward_seconds = forward;
      cost.backward_seconds = backward;
    }
    if (!choice.recomputed) {
      kept_cost = cost;
      block.forward_seconds = cost.forward_seconds;
      block.backward_seconds = cost.backward_seconds;
    } else if (choice.keep.empty()) {
      least = cost.held;
    } else if (cost.held <= least) {
      // the function calls no operator whose results this treatment keeps, so it equals plain recomputation
      continue;
    }
    const double extra =
        cost.forward_seconds + cost.backward_seconds - kept_cost.forward_seconds - kept_cost.backward_seconds;
    block.choices.push_back({choice.name, cost.held, choice.recomputed ? std::max(kLeastExtra, extra) : 0.0,
                             0, std::max(cost.forward_bytes, cost.held),
                             std::max(cost.backward_bytes, cost.held)});
  }
  return block;
}

}  // namespace

SequencePlan plan_sequential(const std::vector<BlockFunction>& functions, const Tensor& x,
                             int64_t budget_bytes, const std::vector<int64_t>& kinds,
                             OffloadActivations* offload, const std::vector<Tensor>& buffers) {
  TORCH_CHECK(kinds.empty() || kinds.size() == functions.size(),
              "plan_sequential: kinds: expected a number for each of the ", functions.size(),
              " functions, or none, received ", kinds.size());
  // Check the autograd engine before the measurements start, because they run backward passes.
  activations::expect_engine("plan_sequential");
  const activations::RngState rng(std::vector<Tensor>{x});
  const activations::RngGuard rng_after(rng);
  activations::KeptBuffersGuard buffers_guard(buffers);
  std::map<int64_t, PlanBlock> measured;
  std::vector<PlanBlock> blocks;
  GradientsAside aside;
  Tensor input = x.detach();
  bool differentiable = x.requires_grad();
  for (size_t i = 0; i < functions.size(); ++i) {
    const int64_t kind = kinds.empty() ? static_cast<int64_t>(i) : kinds[i];
    const at::AutoGradMode gradients(true);
    const Tensor y = functions[i](differentiable ? input.detach().requires_grad_() : input);
    if (!measured.contains(kind)) {
      aside.add(y);
      measured.emplace(kind, planned(functions[i], input, differentiable, offload));
    }
    blocks.push_back(measured.at(kind));
    differentiable = y.requires_grad();
    input = y.detach();
  }
  buffers_guard.done();
  CheckpointPlanOptions link;
  if (offload != nullptr) {
    int64_t most = 0;
    for (const PlanBlock& block : blocks) most += block.choices[0].bytes;
    link = offload->measure_link(most);
  }
  SequencePlan plan{checkpoint_plan(blocks, budget_bytes, link), {}};
  for (size_t i = 0; i < functions.size(); ++i) plan.names.push_back(blocks[i].choices[plan.choices[i]].name);
  return plan;
}

Tensor checkpoint_sequential(const std::vector<BlockFunction>& functions, const SequencePlan& plan, Tensor x,
                             OffloadActivations* offload, const std::vector<Tensor>& buffers) {
  TORCH_CHECK(plan.names.size() == functions.size(), "checkpoint_sequential: plan: expected a plan for ",
              functions.size(), " functions, received one for ", plan.names.size());
  const auto& all = activations::choices();
  for (size_t i = 0; i < functions.size(); ++i) {
    const auto choice =
        std::find_if(all.begin(), all.end(), [&](const Choice& one) { return plan.names[i] == one.name; });
    TORCH_CHECK(choice != all.end(),
                "checkpoint_sequential: plan: expected names from plan_sequential, such as \"keep\" and "
                "\"recompute\", received \"",
                plan.names[i], "\"");
    TORCH_CHECK(!choice->offloaded || offload != nullptr,
                "checkpoint_sequential: offload: expected the OffloadActivations that the plan was made "
                "with, received none, but function ",
                i, " is \"", choice->name, "\"");
    x = run(*choice, functions[i], x, offload, buffers);
    if (offload == nullptr || !c10::GradMode::is_enabled()) continue;
    const bool last = i + 1 == functions.size();
    // Backward begins with the last function, so the activations of the last function stay on the device.
    if (choice->offloaded && !last) offload->mark();
    // The plan assumes that all copies to the host have finished when backward begins.
    offload->wait(last ? 0 : plan.pending_bytes[i + 1]);
  }
  return x;
}

}  // namespace shoestring
