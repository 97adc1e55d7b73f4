#include "planned.h"

#include <c10/util/Exception.h>
#include <shoestring/planning/sequence_plan.h>

#include <algorithm>
#include <string>
#include <vector>

#include "input_error.h"

namespace {

// Options that a plan decides, besides --workspace-mb, which only some plans do.
constexpr const char* kDecided[] = {"accumulate", "precision",   "optimizer-state", "step-in-backward",
                                    "offload",    "activations", "memory-budget"};

// Returns the first line of a library's error, after the name of its function.
std::string reason(const c10::Error& error, const std::string& function) {
  const std::string text = error.what_without_backtrace();
  return text.substr(text.starts_with(function) ? function.size() : 0);
}

// Returns how a weight is stored, without how it is rounded: "bf16" for "bf16-stochastic".
std::string storage(const std::string& weights) { return weights.substr(0, weights.find('-')); }

shoestring::TrainingPlan load_plan(const std::string& path) {
  try {
    return shoestring::TrainingPlan::load(path);
  } catch (const c10::Error& error) {
    throw InputError("--plan " + reason(error, "TrainingPlan: load: "));
  }
}

}  // namespace

void follow_plan(const CommandLine& line, LoopOptions& o) {
  if (o.plan.empty()) return;
  const std::string option = "--plan " + o.plan;
  for (const std::string decided : kDecided)
    refuse_together(option, true, "--" + decided, line.is_given(decided));
  const shoestring::TrainingPlan plan = load_plan(o.plan);
  const auto expect = [&](bool good, const std::string& field, const std::string& expected,
                          const std::string& got) {
    if (!good) throw InputError(option + ": " + field + ": expected " + expected + ", got " + got);
  };
  const int64_t rows = plan.micro_batch * plan.accumulate;
  expect(!line.is_given("batch-size") || o.batch_size == rows, "micro_batch",
         std::to_string(o.batch_size) + " rows in a step, as --batch-size says",
         std::to_string(plan.accumulate) + " x " + std::to_string(plan.micro_batch) + "; plan anew");
  expect(plan.parallel == "none", "parallel", "a plan of one process", plan.parallel);
  expect(plan.precision != "as the weights", "precision", "a value of --precision", plan.precision);
  expect(plan.weights == "fp32" || storage(plan.weights) == "bf16", "weights", "a value of --weights",
         plan.weights);
  if (!line.is_given("weights")) o.weights = plan.weights;
  expect(storage(o.weights) == storage(plan.weights), "weights", storage(o.weights) + ", as --weights says",
         plan.weights);
  o.batch_size = plan.micro_batch;
  o.accumulate = plan.accumulate;
  o.precision = plan.precision;
  o.optimizer_state = plan.optimizer_state;
  o.step_in_backward = plan.step_in_backward;
  o.offload = plan.offload;
  if (plan.workspace_mb > 0) {
    refuse_together(option, true, "--workspace-mb", line.is_given("workspace-mb"));
    o.workspace_mb = plan.workspace_mb;
  }
  o.training_plan = plan;
}

std::optional<shoestring::SequencePlan> planned_layers(const LoopOptions& options, int64_t layers) {
  if (!options.training_plan) return std::nullopt;
  std::vector<std::string> names;
  for (int64_t i = 0; i < layers; ++i) names.push_back("model.layers." + std::to_string(i));
  try {
    return shoestring::sequence_plan(*options.training_plan, names, /*before=*/1, /*after=*/2);
  } catch (const c10::Error& error) {
    throw InputError("--plan " + options.plan + ": " + reason(error, "sequence_plan: "));
  }
}

bool offloads(const shoestring::SequencePlan& plan) {
  return std::any_of(plan.names.begin(), plan.names.end(),
                     [](const std::string& name) { return name.find("offload") != std::string::npos; });
}
