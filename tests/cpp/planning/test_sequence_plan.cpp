#include "catch.h"

#include <shoestring/planning/sequence_plan.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

using namespace shoestring;
using Catch::Contains;

namespace {

TrainingPlan planned(const std::vector<std::string>& treatments) {
  TrainingPlan plan;
  for (const std::string& treatment : treatments)
    plan.checkpoints.push_back({"layers." + std::to_string(plan.checkpoints.size()), treatment, 0, 0});
  return plan;
}

}  // namespace

TEST_CASE("Blocks of a sequence have the treatments of a training plan", "[plan_training]") {
  TrainingPlan plan = planned({"keep", "offload", "recompute"});
  plan.checkpoints[0].pending_bytes = 1, plan.checkpoints[1].pending_bytes = 2,
  plan.checkpoints[2].pending_bytes = 3;
  const std::vector<std::string> names{"layers.0", "layers.1", "layers.2"};
  using Names = std::vector<std::string>;
  using Bytes = std::vector<int64_t>;
  const SequencePlan alone = sequence_plan(plan, names);
  CHECK(alone.names == Names{"keep", "offload", "recompute"});
  CHECK(alone.pending_bytes == Bytes{0, 1, 2});
  const SequencePlan whole = sequence_plan(plan, names, 2, 2);
  CHECK(whole.names == Names{"keep", "keep", "keep", "offload", "recompute", "keep", "keep"});
  // what may be pending when a function begins
  CHECK(whole.pending_bytes == Bytes{0, 0, 0, 1, 2, 3, 3});
  CHECK(sequence_plan(TrainingPlan(), {}, 1, 0).pending_bytes == Bytes{0});
}

TEST_CASE("A sequence that follows a training plan has the gradients of plain training", "[plan_training]") {
  const at::Tensor weight = torch::randn({8, 8}).requires_grad_(), x = torch::randn({4, 8});
  const std::vector<BlockFunction> functions(4, [&](const at::Tensor& y) { return y.matmul(weight).tanh(); });
  const auto gradient = [&](const TrainingPlan& plan) {
    const SequencePlan sequence = sequence_plan(plan, {"layers.0", "layers.1"}, 1, 1);
    return torch::autograd::grad({checkpoint_sequential(functions, sequence, x).sum()}, {weight})[0];
  };
  const at::Tensor expected = gradient(planned({"keep", "keep"}));
  CHECK(gradient(planned({"recompute", "keep attention and products"})).equal(expected));
}

TEST_CASE("A training plan of another model is refused", "[plan_training]") {
  const TrainingPlan plan = planned({"keep", "keep"});
  CHECK_THROWS_WITH(sequence_plan(plan, {"layers.0"}),
                    Contains("sequence_plan: blocks: expected the 2 planned ones, received 1; plan anew"));
  CHECK_THROWS_WITH(sequence_plan(plan, {"layers.0", "h.1"}),
                    Contains("sequence_plan: blocks: expected layers.1 as block 1, received h.1; plan anew"));
  CHECK_THROWS_WITH(sequence_plan(plan, {"layers.0", "layers.1"}, -1),
                    Contains("before and after: expected numbers of functions, received -1 and 0"));
}
