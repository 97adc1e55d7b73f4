#include "options.h"

#include <cctype>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "input_error.h"

namespace {

constexpr int64_t kMostSteps = 1'000'000'000;

bool is_place(const std::string& offload) {
  return offload == "none" || offload == "cpu" || offload == "stream" || is_on_disk(offload);
}

}  // namespace

int64_t bytes_of(const std::string& text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (error != std::errc() || !std::isdigit(static_cast<unsigned char>(text[0]))) return 0;
  std::string unit;
  for (const char* at = rest; at < end; ++at) {
    if (*at != ' ') unit += static_cast<char>(std::toupper(static_cast<unsigned char>(*at)));
  }
  double factor = unit.empty() || unit == "B" ? 1 : 0;
  int power = 1;
  for (const char* prefix : {"K", "M", "G"}) {
    if (unit == std::string(prefix) + "B") factor = std::pow(1000, power);
    if (unit == std::string(prefix) + "IB") factor = std::pow(1024, power);
    ++power;
  }
  const double bytes = number * factor;
  return bytes < 0x1p63 ? static_cast<int64_t>(bytes) : 0;
}

bool is_on_disk(const std::string& place) { return place.starts_with("nvme:") && place.size() > 5; }

int64_t LoopOptions::budget_bytes() const { return memory_budget.empty() ? 0 : bytes_of(memory_budget); }

void add_loop_options(CommandLine& line, LoopOptions& o, int64_t least_steps) {
  constexpr auto kDecides = CommandLine::kDecides, kMayChange = CommandLine::kMayChange;
  line.add("data", o.data, kMayChange, "token file that `shoestring tokenize` wrote");
  line.add("device", o.device, kMayChange,
           "auto (the accelerator, if there is one), cpu, cuda, cuda:1 and so on");
  line.add(
      "plan", o.plan, kMayChange,
      "file of `shoestring plan --json`, which decides how a step runs; --batch-size is then that of a step");
  line.add("precision", o.precision, kDecides, "of matrix products; fp16 scales the loss",
           {"fp32", "tf32", "bf16", "fp16"});
  line.add("weights", o.weights, kDecides, "how trained weights are stored and rounded",
           {"fp32", "bf16", "bf16-stochastic", "bf16-remainder"});
  line.add("optimizer", o.optimizer, kDecides, "muon leaves embeddings and vectors to adamw",
           {"adamw", "lion", "sgd", "ademamix", "schedule-free-adamw", "lamb", "adafactor", "came", "muon"});
  line.add("optimizer-state", o.optimizer_state, kDecides, "how moments are stored",
           {"8bit", "4bit", "bf16", "fp32"});
  line.add("step-in-backward", o.step_in_backward, kDecides,
           "step each parameter once its gradient is complete");
  line.add("offload", o.offload, kMayChange,
           "where the optimizer's state lies: none, cpu, stream or nvme:DIR");
  line.add("activations", o.activations, kMayChange, "of each layer, until its backward",
           {"keep", "recompute", "offload"});
  line.add(
      "memory-budget", o.memory_budget, kMayChange,
      "largest memory for activations, such as 2GiB: as many layers are recomputed, or with --activations "
      "offload copied to host memory, as that needs");
  line.add("steps", o.steps, least_steps, kMostSteps, kDecides, "optimizer steps");
  line.add("batch-size", o.batch_size, 1, 1 << 16, kDecides, "rows in a micro-batch");
  line.add("seq-len", o.seq_len, 1, 1 << 24, kDecides, "tokens in a row");
  line.add("accumulate", o.accumulate, 1, 1 << 16, kDecides, "micro-batches in a step");
  line.add("lr", o.lr, 0, 1e38, kDecides, "highest learning rate");
  line.add("warmup", o.warmup, 0, kMostSteps, kDecides, "steps of linear warm-up");
  line.add("schedule", o.schedule, kDecides, "of the learning rate after warm-up",
           {"constant", "linear", "cosine", "wsd", "flat-cos", "inverse-sqrt"});
  line.add("weight-decay", o.weight_decay, 0, 1000, kDecides, "decoupled weight decay of matrices");
  line.add("clip", o.clip, 0, 1e30, kDecides, "largest gradient norm; 0 does not clip");
  line.add("seed", o.seed, 0, 0xffffffff, kDecides, "of the initial weights and the order of the data");
  line.add("val-fraction", o.val_fraction, 0, 1, kDecides,
           "share of the data held out for validation, less than 1; 0 holds nothing out");
  line.add("eval-every", o.eval_every, 1, kMostSteps, kDecides, "steps between validations");
  line.add("eval-batches", o.eval_batches, 1, kMostSteps, kDecides, "most batches in a validation");
  line.add("workspace-mb", o.workspace_mb, 1, 1 << 20, kDecides, "memory of the fused loss, in MiB");
  line.add("log-every", o.log_every, 0, kMostSteps, kMayChange,
           "steps between reads of loss and norm from the device; 0: 1 on the CPU, else 10");
  line.add("host-allocator", o.host_allocator, kMayChange,
           "on the CPU, reuse freed memory of tensors, in huge pages");
  line.add("threads", o.threads, 0, 4096, kMayChange,
           "CPU threads; 0: what PyTorch takes; bits can depend on the number");
}

void check_loop_options(const LoopOptions& o) {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw InputError(message);
  };
  require(!o.data.empty(), "--data: expected a token file that `shoestring tokenize` wrote, got none");
  require(is_place(o.offload), "--offload: expected none, cpu, stream or nvme:DIR, got " + o.offload);
  require(
      o.memory_budget.empty() || o.budget_bytes() > 0,
      "--memory-budget: expected a number of bytes, or a size such as 6GiB or 500MB, got " + o.memory_budget);
  require(o.weights == "fp32" || o.precision == "bf16",
          "--weights " + o.weights + ": expected --precision bf16 with bf16 weights, got --precision " +
              o.precision);
  require(o.val_fraction < 1, "--val-fraction: expected 0 to less than 1, got 1");
  const std::string budget = "--memory-budget " + o.memory_budget;
  refuse_together(budget, !o.memory_budget.empty(), "--activations recompute", o.activations == "recompute");
  refuse_together("--optimizer muon", o.optimizer == "muon", "--step-in-backward", o.step_in_backward);
  // The gradients of all parameters say whether a step with a scaled loss is skipped.
  refuse_together("--precision fp16", o.scales_loss(), "--step-in-backward", o.step_in_backward);
  const std::initializer_list<std::pair<std::string, bool>> ours{
      {"--offload " + o.offload, o.offload != "none"},
      {budget, !o.memory_budget.empty()},
      {"--activations " + o.activations, o.activations != "keep"},
      {"--weights " + o.weights, o.weights != "fp32" && o.weights != "bf16"},
      {"--optimizer " + o.optimizer, o.optimizer != "adamw"},
      {"--step-in-backward", o.step_in_backward},
  };
  for (const auto& [option, given] : ours) refuse_together(option, given, "--baseline", o.baseline);
  refuse_together("--plan " + o.plan, !o.plan.empty(), "--baseline", o.baseline);
}

void refuse_together(const std::string& option, bool given, const std::string& other, bool other_given) {
  if (given && other_given)
    throw InputError(option + ": expected no " + other + ", received both; leave one of them out");
}
