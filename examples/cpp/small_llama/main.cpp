// Trains a small Llama on a token file by the recipe of examples/python/small_llama.py, in C++ alone: Muon
// and 8-bit AdamW, rates by WSD, a guard against bad steps, and an average of the weights. Both programs take
// the same steps with the same options, and each continues the runs of the other.

#include <ATen/Parallel.h>
#include <shoestring/checkpoint/autograd.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <string>

#include "command_line.h"
#include "data.h"
#include "input_error.h"
#include "llama.h"
#include "processes.h"
#include "recipe.h"

using at::Tensor;

namespace {

constexpr int64_t kValidationBlocks = 64;  // the last blocks of the file

struct Options : RecipeOptions {
  std::string data = "stdlib.tokens", run;
  bool resume = false;
  int64_t save_every = 100, batch_size = 32, seq_len = 128, layers = 6, width = 192, heads = 6;
  int64_t until = 0, eval_every = 25, seed = 0, threads = 0;
};

Options parse(int argc, const char* const* argv) {
  Options o;
  constexpr auto kAny = CommandLine::kMayChange;
  constexpr int64_t kMost = 1'000'000'000;
  CommandLine line("small_llama --data FILE [options]: trains a small Llama by a recipe");
  line.add("data", o.data, kAny, "token file of `shoestring tokenize`");
  line.add("run", o.run, kAny, "file to which the run is saved");
  line.add("save-every", o.save_every, 1, kMost, kAny, "steps between two saves");
  line.add("resume", o.resume, kAny, "continue the run in --run, which Python may have saved");
  line.add("until", o.until, 0, kMost, kAny,
           "last step of this process, 0 for all; --resume takes the others");
  line.add("steps", o.steps, 1, kMost, kAny, "steps of the optimizers");
  line.add("warmup", o.warmup, 1, kMost, kAny, "steps in which the rates rise");
  line.add("batch-size", o.batch_size, 1, 1 << 20, kAny, "rows of a step");
  line.add("seq-len", o.seq_len, 1, 1 << 20, kAny, "tokens of a row");
  line.add("layers", o.layers, 1, 1 << 14, kAny, "blocks of the model");
  line.add("width", o.width, 2, 1 << 20, kAny, "width of the model, a multiple of twice --heads");
  line.add("heads", o.heads, 2, 1 << 14, kAny, "heads of queries, an even number");
  line.add("lr", o.lr, 0, 1e3, kAny, "highest learning rate");
  line.add("ema", o.ema, 0, 0.999999, kAny, "decay of the average");
  line.add("eval-every", o.eval_every, 1, kMost, kAny, "steps between two evaluations");
  line.add("seed", o.seed, 0, kMost, kAny, "seed of weights and batches");
  line.add("threads", o.threads, 0, 1 << 16, kAny, "threads; 0 takes those of LibTorch");
  line.parse(argc, argv);
  if (o.width % (2 * o.heads) != 0 || o.heads % 2 != 0) {
    throw InputError("--width " + std::to_string(o.width) + " --heads " + std::to_string(o.heads) +
                     ": expected even heads, and a width that 2 x heads divides");
  }
  if (o.resume && o.run.empty())
    throw InputError("--resume: expected --run FILE of an earlier run, got none");
  return o;
}

/// Returns the mean loss of the validation blocks.
double evaluate(SmallLlama& model, const Blocks& blocks, int64_t batch_size) {
  const torch::NoGradGuard no_grad;
  double total = 0;
  for (int64_t begin = 0; begin < blocks.count; begin += batch_size) {
    std::vector<int64_t> numbers(std::min(batch_size, blocks.count - begin));
    std::iota(numbers.begin(), numbers.end(), begin);
    total += model(blocks.rows(numbers)).item<double>() * static_cast<double>(numbers.size());
  }
  return total / static_cast<double>(blocks.count);
}

void train(const Options& o) {
  const Processes alone;
  if (o.threads > 0) at::set_num_threads(static_cast<int>(o.threads));
  const TokenFile file(o.data);
  const int64_t blocks = (file.size() - 1) / o.seq_len - kValidationBlocks;
  if (blocks < 1) {
    throw InputError("--data " + o.data + ": expected more than " + std::to_string(kValidationBlocks) +
                     " blocks of --seq-len " + std::to_string(o.seq_len) + ", got fewer");
  }
  const Blocks training{file, o.seq_len, 0, blocks}, validation{file, o.seq_len, blocks, kValidationBlocks};
  BatchOrder order(blocks, o.batch_size, o.seed);
  torch::manual_seed(static_cast<uint64_t>(o.seed));
  SmallLlama model(file.vocab_size(), o.width, o.layers, o.heads);
  Recipe recipe(model, o);
  const std::map<std::string, std::string> facts{
      {"data", std::to_string(file.size()) + " tokens, vocabulary " + std::to_string(file.vocab_size())},
      {"steps", std::to_string(o.steps)}};
  shoestring::callbacks::Run run{model.get(), {&recipe.muon, &recipe.adamw}};
  if (o.resume) run.step = recipe.load(o.run, facts);
  int64_t parameters = 0;
  for (const Tensor& p : model->parameters()) parameters += p.numel();
  std::printf("%.1f M parameters, %s\n", static_cast<double>(parameters) / 1e6, facts.at("data").c_str());
  const int64_t last = o.until > 0 ? std::min(o.steps, o.until) : o.steps;
  double seconds = 0;
  while (run.step < last) {
    const auto began = std::chrono::steady_clock::now();
    run.loss = model(training.rows(order.batch(run.step)));
    run.loss.backward();
    recipe.step(run);
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    if (run.step % o.eval_every == 0 || run.step == last) {
      const double plain = evaluate(model, validation, o.batch_size);
      const auto swapped = recipe.averages.swap();
      std::printf("step %lld  loss %.6g  seconds %.6g  validation %.6g  average %.6g\n",
                  static_cast<long long>(run.step), run.loss.item<double>(), seconds, plain,
                  evaluate(model, validation, o.batch_size));
      std::fflush(stdout);
    }
    if (!o.run.empty() && (run.step % o.save_every == 0 || run.step == last))
      recipe.save(o.run, run.step, facts);
  }
  recipe.guard.check();
  std::printf("%zu bad steps were skipped\n", recipe.guard.bad_steps().size());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    shoestring::install_autograd_engine();
    train(parse(argc, argv));
    return 0;
  } catch (const c10::Error& error) {
    return report_error("small_llama", error.what_without_backtrace());
  } catch (const std::exception& error) {
    return report_error("small_llama", error.what());
  }
}
