#include "options.h"

#include "flags.h"

namespace {

const Flag<Options> kFlags[] = {
    {"data", &Options::data, 0, false, "token file that `shoestring tokenize` wrote"},
    {"out", &Options::out, 0, false, "folder for checkpoints and the trained model"},
    {"layers", &Options::layers, 1, true, "decoder layers"},
    {"hidden", &Options::hidden, 2, true, "width of the model"},
    {"heads", &Options::heads, 1, true, "attention heads"},
    {"kv-heads", &Options::kv_heads, 1, true, "heads of keys and values; --heads is a multiple of it"},
    {"steps", &Options::steps, 1, true, "optimizer steps"},
    {"batch-size", &Options::batch_size, 1, true, "sequences in a micro-batch"},
    {"seq-len", &Options::seq_len, 1, true, "tokens in a sequence"},
    {"accumulate", &Options::accumulate, 1, true, "micro-batches in a step"},
    {"lr", &Options::lr, 0, true, "highest learning rate; cosine decay to 0"},
    {"warmup", &Options::warmup, 0, true, "steps of linear warm-up"},
    {"weight-decay", &Options::weight_decay, 0, true, "decay of the matrices"},
    {"clip", &Options::clip, 0, true, "largest gradient norm; 0: no clipping"},
    {"seed", &Options::seed, 0, true, "of the weights and the order of the data"},
    {"checkpoint-every", &Options::checkpoint_every, 1, false,
     "steps between checkpoints; the last two are kept"},
    {"threads", &Options::threads, 0, false, "0: as many as PyTorch chooses; bits can depend on the number"},
    {"memory-budget", &Options::memory_budget, 0, false,
     "MiB for activations: as many layers are recomputed in backward as that needs; 0: none"},
    {"offload", &Options::offload, 0, false, "where AdamW's state lies: none, cpu, stream or nvme:DIR"},
    {"resume", &Options::resume, 0, false, "continue the run in --out"},
    {"plain", &Options::plain, 0, true, "LibTorch's own loss and AdamW, for comparison"},
};

void check(const Options& o) {
  const auto require = [](bool condition, const std::string& what) {
    if (!condition) throw InputError(what);
  };
  require(!o.data.empty(), "--data: missing; give the token file that `shoestring tokenize` wrote");
  require(!o.out.empty(), "--out: missing; give a folder for checkpoints and the trained model");
  require(o.hidden % (2 * o.heads) == 0, "--hidden: expected a multiple of twice --heads, " +
                                             std::to_string(2 * o.heads) + ", received " +
                                             std::to_string(o.hidden));
  require(o.offload == "none" || !o.plain, "--offload: expected none with --plain, received " + o.offload);
  require(o.heads % o.kv_heads == 0, "--kv-heads: expected a divisor of --heads, " + std::to_string(o.heads) +
                                         ", received " + std::to_string(o.kv_heads));
}

}  // namespace

Options parse_options(int argc, char** argv) {
  Options options;
  parse_flags<Options>(
      argc, argv, "train_gpt --data FILE --out FOLDER [options]: trains a Llama-style model from scratch",
      kFlags, options);
  check(options);
  return options;
}

std::map<std::string, std::string> deciding_options(const Options& options) {
  return deciding<Options>(options, kFlags);
}
