#include "options.h"

#include <initializer_list>
#include <utility>

#include "input_error.h"
#include "planned.h"

namespace {

void check(const TrainOptions& o) {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw InputError(message);
  };
  require(!o.out.empty(), "--out: expected a folder for checkpoints and the trained model, got none");
  require(o.hidden % (2 * o.heads) == 0, "--hidden: expected a multiple of twice --heads, " +
                                             std::to_string(2 * o.heads) + ", got " +
                                             std::to_string(o.hidden));
  require(o.heads % o.kv_heads == 0, "--kv-heads: expected a divisor of --heads, " + std::to_string(o.heads) +
                                         ", got " + std::to_string(o.kv_heads));
  require(
      o.experts == 0 || o.top_k <= o.experts,
      "--top-k: expected 1 to --experts, " + std::to_string(o.experts) + ", got " + std::to_string(o.top_k));
  refuse_together("--plan " + o.plan, !o.plan.empty(), "--experts " + std::to_string(o.experts),
                  o.experts > 0);
  if (o.training_plan) {
    const auto expect_none = [&](const char* field, const std::string& value) {
      require(value == "none", "--plan " + o.plan + ": " + field + ": expected none, since train_gpt does " +
                                   "nothing else, got " + value);
    };
    expect_none("adapters", o.training_plan->adapters);
    expect_none("quantize", o.training_plan->quantize);
    expect_none("weights_place", o.training_plan->weights_place);
    expect_none("tiles", o.training_plan->levers().at("tiles"));
    planned_layers(o, o.layers);
  }
  const bool zero2 = o.parallel == "zero2", zero3 = o.parallel == "zero3";
  const std::initializer_list<std::pair<std::string, bool>> refused{
      {"--baseline", o.baseline},
      {"--plan " + o.plan, !o.plan.empty()},
      {"--step-in-backward", o.step_in_backward},
      {"--offload " + o.offload, o.offload == "cpu" && !zero3 && o.parallel != "ddp"},
      // the norm of all gradients is known to one optimizer alone
      {"--optimizer muon", o.optimizer == "muon" && zero2},
      {"--precision fp16", o.scales_loss() && (zero2 || zero3)},
      // the plan measures backward, which sends gradients
      {"--memory-budget " + o.memory_budget, !o.memory_budget.empty() && (zero2 || zero3)},
  };
  for (const auto& [option, given] : refused)
    refuse_together("--parallel " + o.parallel, o.parallel != "none", option, given);
  refuse_together("--parallel none", o.parallel == "none", "--compress " + o.compress, o.compress != "none");
}

}  // namespace

TrainOptions parse_options(int argc, const char* const* argv) {
  constexpr auto kDecides = CommandLine::kDecides, kMayChange = CommandLine::kMayChange;
  TrainOptions o;
  CommandLine line("train_gpt --data FILE --out FOLDER [options]: trains a Llama-style model from scratch");
  line.add("out", o.out, kMayChange, "folder for checkpoints and the trained model");
  add_loop_options(line, o, /*least_steps=*/1);
  line.add("layers", o.layers, 1, 1 << 14, kDecides, "decoder layers");
  line.add("hidden", o.hidden, 2, 1 << 20, kDecides, "width of the model");
  line.add("heads", o.heads, 1, 1 << 14, kDecides, "attention heads");
  line.add("kv-heads", o.kv_heads, 1, 1 << 14, kDecides,
           "heads of keys and values; --heads is a multiple of it");
  line.add("experts", o.experts, 0, 2048, kDecides,
           "replace each MLP by a mixture of so many, balanced by a loss; 0: none");
  line.add("top-k", o.top_k, 1, 2048, kDecides, "experts of a token, with --experts");
  line.add("checkpoint-every", o.checkpoint_every, 1, 1'000'000'000, kMayChange,
           "steps between checkpoints; the last two are kept");
  line.add("resume", o.resume, kMayChange,
           "continue the run in --out from its newest checkpoint, bit for bit");
  line.add("parallel", o.parallel, kMayChange,
           "what the processes that torchrun starts share besides the batch",
           {"none", "ddp", "zero1", "zero2", "zero3"});
  line.add(
      "compress", o.compress, kMayChange,
      "how processes send gradients, for slow links; a resumed run begins without what the last codes have "
      "left out",
      {"none", "8bit", "4bit", "1bit"});
  line.add("baseline", o.baseline, kDecides, "the same with LibTorch's own loss and AdamW, to compare");
  line.parse(argc, argv);
  if (line.is_given("top-k") && o.experts == 0)
    throw InputError("--top-k: expected --experts with it, whose number of a token it is, got none");
  follow_plan(line, o);
  check_loop_options(o);
  check(o);
  o.deciding = line.deciding();
  return o;
}
