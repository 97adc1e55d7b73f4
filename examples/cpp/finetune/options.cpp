#include "options.h"

#include <sstream>

#include "input_error.h"
#include "planned.h"

namespace {

void check(const FinetuneOptions& o) {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw InputError(message);
  };
  require(!o.model.empty(), "--model: expected the Hugging Face directory of a Llama, got none");
  require(!o.out.empty() || o.steps == 0, "--out: expected a folder for the adapter, got none");
  require(o.init != "loftq" || o.quantize != "none",
          "--init loftq: expected quantised weights, got --quantize none");
  require(!o.targets().empty() || o.target_modules == "all-linear",
          "--target-modules: expected all-linear, or names separated by commas; got none");
  // Both options compute a result from held-out tokens.
  refuse_together("--steps 0", o.steps == 0, "--val-fraction 0", o.val_fraction == 0);
  refuse_together("--logits", !o.logits.empty(), "--val-fraction 0", o.val_fraction == 0);
  refuse_together("--keep-memory", o.keep_memory, "--step-in-backward", o.step_in_backward);
  require(!o.weights_leave() || o.offload_weights == "cpu" || is_on_disk(o.offload_weights),
          "--offload-weights: expected none, cpu or nvme:DIR, got " + o.offload_weights);
  require(o.keep.empty() || o.keep == "0" || bytes_of(o.keep) > 0,
          "--keep: expected a number of bytes, or a size such as 6GiB or 500MB, got " + o.keep);
  require(o.keep.empty() || o.weights_leave(), "--keep: expected --offload-weights, got none");
  // These initial values are computed from the weights of each layer.
  refuse_together("--init " + o.init, o.init == "pissa" || o.init == "olora" || o.init == "loftq",
                  "--offload-weights", o.weights_leave());
}

// Sets the options that --plan decides for frozen weights.
void follow_weights(const CommandLine& line, FinetuneOptions& o) {
  if (!o.training_plan) return;
  const std::string option = "--plan " + o.plan;
  for (const std::string decided : {"offload-weights", "keep"})
    refuse_together(option, true, "--" + decided, line.is_given(decided));
  const auto& plan = *o.training_plan;
  if (plan.quantize != "none" && plan.quantize != o.quantize)
    throw InputError("--quantize: expected " + plan.quantize + ", as planned in " + o.plan + ", got " +
                     o.quantize);
  if (!plan.tiles.empty())
    throw InputError(option + ": tiles: expected none, since finetune brings whole layers, got tiles of " +
                     plan.tiles.begin()->first);
  o.offload_weights = plan.weights_place;
  if (o.weights_leave()) o.keep = std::to_string(plan.keep);
}

}  // namespace

std::vector<std::string> FinetuneOptions::targets() const {
  std::vector<std::string> names;
  std::stringstream stream(target_modules == "all-linear" ? "" : target_modules);
  for (std::string name; std::getline(stream, name, ',');) {
    if (!name.empty()) names.push_back(name);
  }
  return names;
}

FinetuneOptions parse_options(int argc, const char* const* argv) {
  constexpr auto kDecides = CommandLine::kDecides, kMayChange = CommandLine::kMayChange;
  FinetuneOptions o;
  CommandLine line("finetune --model FOLDER --data FILE --out FOLDER [options]: QLoRA of a Llama");
  line.add("model", o.model, kDecides, "Hugging Face directory of a Llama: config.json and safetensors");
  line.add("out", o.out, kMayChange, "folder for the adapter, in PEFT's format");
  // 0 steps compute the loss on the held-out tokens alone.
  add_loop_options(line, o, /*least_steps=*/0);
  line.add("quantize", o.quantize, kDecides, "how frozen weights of linear layers are kept",
           {"nf4", "fp4", "int4", "int8", "none"});
  line.add("block-size", o.block_size, 32, 1 << 20, kDecides, "of 4 bits: weights that share a scale");
  line.add("no-double-quant", o.no_double_quant, kDecides, "of nf4 and fp4: scales in fp32, not in 8 bits");
  line.add("rank", o.rank, 1, 1 << 14, kDecides, "rank of the adapters");
  line.add("alpha", o.alpha, 0, 1e6, kDecides, "adapters are scaled by alpha / rank");
  line.add("target-modules", o.target_modules, kDecides, "all-linear, or names separated by commas");
  line.add("init", o.init, kDecides, "of the adapters", {"default", "gaussian", "pissa", "olora", "loftq"});
  line.add("lr-ratio", o.lr_ratio, 1, 1e6, kDecides, "how much faster than lora_A lora_B learns (LoRA+)");
  line.add("offload-weights", o.offload_weights, kMayChange,
           "where frozen weights lie while no layer needs them: none, cpu or nvme:DIR");
  line.add("keep", o.keep, kMayChange, "with --offload-weights: size of the layers that stay, such as 1GiB");
  line.add("keep-memory", o.keep_memory, kMayChange,
           "keep what is freed for the next step: faster on the CPU, and more memory");
  line.add("json", o.json, kMayChange, "also write losses, speed and memory to this file");
  line.add("logits", o.logits, kMayChange,
           "also write the logits of the first held-out sequence to this safetensors file");
  line.parse(argc, argv);
  follow_plan(line, o);
  follow_weights(line, o);
  check_loop_options(o);
  check(o);
  return o;
}
