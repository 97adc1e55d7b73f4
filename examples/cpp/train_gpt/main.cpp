// Trains a Llama-style model from scratch on a token file, in C++ alone. Comments mark the lines that use
// shoestring: the loss, which never stores the logits, and the optimizer, whose state takes 2 bytes per
// parameter instead of 8. With --plain, LibTorch's own loss and optimizer are used instead.

#include <ATen/Parallel.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <shoestring/autograd.h>
#include <shoestring/checkpoint_sequence.h>
#include <shoestring/ops.h>
#include <shoestring/optim.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include "checkpoint.h"
#include "data.h"
#include "flags.h"
#include "folder_lock.h"
#include "model.h"
#include "options.h"
#include "signals.h"
#include "training.h"

using at::Tensor;

namespace {

constexpr int64_t kValidationBatches = 8;
constexpr std::tuple<double, double> kBetas{0.9, 0.95};

// Returns the whole forward pass as functions to run one after the other, for tokens `rows` (rows, tokens +
// 1). The last function returns the mean loss over all positions.
std::vector<shoestring::BlockFunction> functions_of(LlamaForCausalLM& model, const Tensor& rows, bool plain) {
  const int64_t tokens = rows.size(1) - 1;
  auto functions = model->model->functions(tokens);
  functions.emplace_back(
      [weight = model->output_weight(), target = rows.narrow(1, 1, tokens), plain](const Tensor& hidden) {
        if (plain) return at::cross_entropy_loss(at::linear(hidden, weight).flatten(0, 1), target.flatten());
        // shoestring: the loss never stores the logits.
        return shoestring::linear_cross_entropy(hidden, weight, target);
      });
  return functions;
}

Tensor inputs_of(const Tensor& rows) { return rows.narrow(1, 0, rows.size(1) - 1); }

Tensor loss_of(LlamaForCausalLM& model, const Tensor& rows, bool plain) {
  Tensor x = inputs_of(rows);
  for (const auto& function : functions_of(model, rows, plain)) x = function(x);
  return x;
}

// Plans for each function of the forward pass whether its activations are kept or recomputed, so that they
// fit into the memory budget.
std::optional<shoestring::SequencePlan> plan_of(LlamaForCausalLM& model, const Tensor& rows,
                                                const Options& options) {
  if (options.memory_budget == 0) return std::nullopt;
  const auto functions = functions_of(model, rows, options.plain);
  std::vector<int64_t> kinds(functions.size(), 1);  // all layers have the same cost, so only one is measured
  kinds.front() = 0;
  for (size_t i = static_cast<size_t>(options.layers) + 1; i < kinds.size(); ++i)
    kinds[i] = static_cast<int64_t>(i);
  auto plan = shoestring::plan_sequential(functions, inputs_of(rows), options.memory_budget << 20, kinds);
  const auto kept = std::count(plan.names.begin() + 1, plan.names.begin() + 1 + options.layers, "keep");
  std::printf(
      "activations within %lld MiB: %lld of %lld layers are recomputed; predicted %lld MiB and %.3g s a "
      "micro-batch\n",
      static_cast<long long>(options.memory_budget), static_cast<long long>(options.layers - kept),
      static_cast<long long>(options.layers), static_cast<long long>(plan.peak_bytes >> 20), plan.seconds);
  return plan;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(LlamaForCausalLM& model, const Options& options) {
  std::vector<Tensor> matrices, norms;  // weight decay applies to the matrices only
  for (const Tensor& p : model->parameters()) (p.dim() >= 2 ? matrices : norms).push_back(p);
  const auto make = [&]<class AdamW, class AdamWOptions>() {
    const auto defaults = AdamWOptions(options.lr).betas(kBetas).weight_decay(options.weight_decay);
    auto undecayed = std::make_unique<AdamWOptions>(defaults);
    undecayed->weight_decay(0);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(matrices, std::make_unique<AdamWOptions>(defaults));
    groups.emplace_back(norms, std::move(undecayed));
    return std::make_unique<AdamW>(groups, defaults);
  };
  if (options.plain) return make.operator()<torch::optim::AdamW, torch::optim::AdamWOptions>();
  // shoestring: the optimizer state of AdamW has 8 bits per element.
  auto ours = make.operator()<shoestring::optim::AdamW, shoestring::optim::AdamWOptions>();
  // shoestring: the optimizer state of AdamW is in host memory or on a disk.
  if (options.offload != "none") ours->set_offload(options.offload);
  return ours;
}

double validate(LlamaForCausalLM& model, const Blocks& blocks, const Options& options) {
  torch::NoGradGuard no_grad;
  const int64_t count = std::min(blocks.count, kValidationBatches * options.batch_size);
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += options.batch_size) {
    std::vector<int64_t> numbers;
    for (int64_t i = begin; i < std::min(begin + options.batch_size, count); ++i) numbers.push_back(i);
    total += loss_of(model, blocks.rows(numbers), options.plain).item<double>() *
             static_cast<double>(numbers.size());
  }
  return total / static_cast<double>(count);
}

void require_finite(const char* what, double value, int64_t step, const Options& options) {
  if (std::isfinite(value)) return;
  throw InputError(
      "step " + std::to_string(step + 1) + ": the " + what + " is " +
      (std::isnan(value) ? "nan" : "infinite") +
      "; training stopped before the weights changed; lower --lr or set --clip" +
      (has_checkpoint(options.out) ? "; the last checkpoint in " + options.out + " is kept" : ""));
}

void train(const Options& options) {
  if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
  const int64_t libtorch = peak_memory();
  const TokenFile file(options.data);
  const auto [blocks, held_out] = split(file, options.seq_len);
  const FolderLock lock(options.out);
  if (!options.resume && has_checkpoint(options.out)) {
    throw InputError("--out " + options.out +
                     ": holds a run already; continue it with --resume or give another --out");
  }
  auto fingerprint = deciding_options(options);
  fingerprint["data"] = file.fingerprint();

  torch::manual_seed(static_cast<uint64_t>(options.seed));
  const LlamaConfig config{.vocab_size = file.vocab_size(),
                           .hidden = options.hidden,
                           .intermediate = 3 * options.hidden,
                           .layers = options.layers,
                           .heads = options.heads,
                           .kv_heads = options.kv_heads,
                           .head_dim = options.hidden / options.heads,
                           .max_tokens = std::max<int64_t>(options.seq_len, 2048)};
  LlamaForCausalLM model(config);
  const auto optimizer = make_optimizer(model, options);
  int64_t parameters = 0;
  for (const Tensor& p : model->parameters()) parameters += p.numel();
  const int64_t start = options.resume ? load_checkpoint(options.out, *model, *optimizer, fingerprint) : 0;
  remove_unfinished(options.out);
  std::printf("%.1f M parameters, %lld tokens, vocabulary %lld, %s, %d threads%s\n",
              static_cast<double>(parameters) / 1e6, static_cast<long long>(file.size()),
              static_cast<long long>(file.vocab_size()), options.plain ? "plain LibTorch" : "shoestring",
              at::get_num_threads(), start > 0 ? (", from step " + std::to_string(start)).c_str() : "");

  BatchOrder order(blocks.count, options.batch_size, options.seed);
  const auto plan = plan_of(model, blocks.rows(order.batch(0)), options);
  Progress progress(options.steps, options.batch_size * options.seq_len * options.accumulate);
  std::optional<DeferredSignals> signals(std::in_place);
  for (int64_t step = start; step < options.steps; ++step) {
    const auto began = std::chrono::steady_clock::now();
    for (auto& group : optimizer->param_groups())
      group.options().set_lr(learning_rate(step, options.steps, options.warmup, options.lr));
    double loss = 0;
    for (int64_t i = 0; i < options.accumulate; ++i) {
      const Tensor rows = blocks.rows(order.batch(step * options.accumulate + i));
      const Tensor whole = plan ? shoestring::checkpoint_sequential(functions_of(model, rows, options.plain),
                                                                    *plan, inputs_of(rows))
                                : loss_of(model, rows, options.plain);
      const Tensor part = whole / options.accumulate;
      require_finite("loss", part.item<double>(), step, options);
      loss += part.item<double>();
      part.backward();
    }
    const double limit = options.clip > 0 ? options.clip : std::numeric_limits<double>::infinity();
    require_finite("gradient norm", torch::nn::utils::clip_grad_norm_(model->parameters(), limit), step,
                   options);
    optimizer->step();
    optimizer->zero_grad();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    progress.show(step + 1, loss, seconds.count());
    if (step == start) tell_wait(seconds.count());
    const int signal = signals->received();
    if ((step + 1) % options.checkpoint_every == 0 || step + 1 == options.steps || signal != 0) {
      save_checkpoint(options.out, step + 1, *model, *optimizer, fingerprint);
    }
    if (signal != 0) throw Interrupted(signal, step + 1);
  }
  if (const int signal = signals->received(); signal != 0) throw Interrupted(signal, options.steps);
  // The checkpoint of the last step has been saved, so a later signal ends the program at once.
  signals.reset();
  const double validation = validate(model, held_out, options);
  save_model(options.out, *model, config.json());
  std::printf(
      "validation loss %.6f, %.0f tokens/s, peak %lld MiB, of which %lld MiB are LibTorch itself\nsaved %s\n",
      validation, progress.tokens_per_second(), static_cast<long long>(peak_memory() >> 20),
      static_cast<long long>(libtorch >> 20), (options.out + "/model.safetensors").c_str());
}

int report(const std::string& message) {
  const bool beside_progress = ::isatty(STDOUT_FILENO) && ::isatty(STDERR_FILENO);
  std::fprintf(stderr, "%strain_gpt: %s\n", beside_progress ? "\n" : "",
               message.substr(0, message.find('\n')).c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    shoestring::install_autograd_engine();
    train(parse_options(argc, argv));
    return 0;
  } catch (const Interrupted& interrupted) {
    std::fprintf(stderr, "train_gpt: checkpoint at step %lld, continue with --resume\n",
                 static_cast<long long>(interrupted.step));
    return 128 + interrupted.signal;
  } catch (const c10::Error& error) {
    return report(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return report(error.what());
  }
}
