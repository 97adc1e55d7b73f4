#include "options.h"

#include <sstream>

#include "flags.h"

namespace {

const Flag<Options> kFlags[] = {
    {"model", &Options::model, 0, true, "Hugging Face directory of a Llama: config.json and safetensors"},
    {"data", &Options::data, 0, true,
     "token file that `shoestring tokenize` wrote, with the model's vocabulary"},
    {"out", &Options::out, 0, false, "folder for the adapter, in PEFT's format"},
    {"quantize", &Options::quantize, 0, true, "nf4, fp4, int4, int8 or none: weights of linear layers"},
    {"block-size", &Options::block_size, 32, true, "of 4 bits: weights that share a scale"},
    {"no-nested", &Options::no_nested, 0, true, "of 4 bits: scales in fp32, not in 8 bits"},
    {"dtype", &Options::dtype, 0, true, "bf16 or fp32: activations, and what is not quantised"},
    {"rank", &Options::rank, 1, true, "of the adapters"},
    {"alpha", &Options::alpha, 0, true, "an adapter is multiplied by alpha / rank"},
    {"targets", &Options::targets, 0, true,
     "layers with an adapter, such as q_proj,v_proj; all linear ones without"},
    {"init", &Options::init, 0, true, "of the adapters: default, gaussian, pissa, olora or loftq"},
    {"steps", &Options::steps, 0, true, "optimizer steps; 0: the loss on the held-out tokens alone"},
    {"batch-size", &Options::batch_size, 1, true, "sequences in a micro-batch"},
    {"seq-len", &Options::seq_len, 1, true, "tokens in a sequence"},
    {"accumulate", &Options::accumulate, 1, true, "micro-batches in a step"},
    {"lr", &Options::lr, 0, true, "highest learning rate; cosine decay to 0"},
    {"lr-ratio", &Options::lr_ratio, 1, true, "how much faster than lora_A lora_B learns (LoRA+); 16, say"},
    {"warmup", &Options::warmup, 0, true, "steps of linear warm-up"},
    {"weight-decay", &Options::weight_decay, 0, true, "of the adapters"},
    {"clip", &Options::clip, 0, true, "largest gradient norm; 0: no clipping"},
    {"seed", &Options::seed, 0, true, "of the adapters and the order of the data"},
    {"threads", &Options::threads, 0, false, "0: as many as PyTorch chooses; bits can depend on the number"},
    {"workspace-mb", &Options::workspace_mb, 1, false,
     "of the loss: bound on the logits that exist at a time"},
    {"no-recompute", &Options::no_recompute, 0, false, "keep all activations: faster, and more memory"},
    {"keep-memory", &Options::keep_memory, 0, false,
     "keep what is freed for the next step: faster, and more memory"},
    {"json", &Options::json, 0, false, "also write losses, speed and memory to this file"},
    {"logits", &Options::logits, 0, false,
     "also write the logits of the first held-out sequence to this safetensors file"},
};

void check(const Options& o) {
  const auto require = [](bool condition, const std::string& what) {
    if (!condition) throw InputError(what);
  };
  const auto one_of = [&](const char* name, const std::string& value, const std::vector<std::string>& known) {
    std::string list;
    bool found = false;
    for (const auto& k : known) found |= k == value, list += (list.empty() ? "" : ", ") + k;
    require(found, "--" + std::string(name) + ": expected one of " + list + ", received '" + value + "'");
  };
  require(!o.model.empty(), "--model: missing; give the Hugging Face directory of a Llama");
  require(!o.data.empty(), "--data: missing; give the token file that `shoestring tokenize` wrote");
  require(!o.out.empty() || o.steps == 0, "--out: missing; give a folder for the adapter");
  one_of("quantize", o.quantize, {"nf4", "fp4", "int4", "int8", "none"});
  one_of("dtype", o.dtype, {"bf16", "fp32"});
  one_of("init", o.init, {"default", "gaussian", "pissa", "olora", "loftq"});
  require(o.init != "loftq" || o.quantize != "none",
          "--init: expected loftq with quantised weights, received --quantize none");
}

}  // namespace

std::vector<std::string> Options::target_modules() const {
  std::vector<std::string> names;
  std::stringstream stream(targets);
  for (std::string name; std::getline(stream, name, ',');) names.push_back(name);
  return names;
}

Options parse_options(int argc, char** argv) {
  Options options;
  parse_flags<Options>(argc, argv,
                       "finetune --model FOLDER --data FILE --out FOLDER [options]: QLoRA of a Llama", kFlags,
                       options);
  check(options);
  return options;
}
