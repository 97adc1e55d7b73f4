// Fine-tunes a Llama from Hugging Face with QLoRA, in C++ alone. The weights are loaded one tensor at a time
// and quantised on the way. Layers are recomputed in backward, and the loss never stores the logits. PEFT can
// load the resulting adapter.

#include <ATen/Parallel.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros_like.h>
#include <malloc.h>
#include <shoestring/autograd.h>
#include <shoestring/lora.h>
#include <shoestring/model_files.h>
#include <shoestring/ops.h>
#include <shoestring/optim.h>
#include <shoestring/safetensors.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/utils.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <limits>
#include <optional>
#include <string>

#include "config.h"
#include "data.h"
#include "flags.h"
#include "folder_lock.h"
#include "model.h"
#include "options.h"
#include "training.h"

using at::Tensor;

namespace {

constexpr int64_t kValidationBatches = 8;

struct Result {
  double validation_before = 0, validation_after = 0, tokens_per_second = 0;
  std::vector<double> losses;
  // Peak memory of the process in bytes: at its start, after the model is loaded, and at the end.
  int64_t libtorch = 0, loaded = 0, peak = 0;
};

LlamaForCausalLM load(const Options& options, const TokenFile& file) {
  const LlamaConfig config = read_config(options.model);
  if (file.vocab_size() > config.vocab_size) {
    throw InputError("--data " + options.data + ": expected a vocabulary of at most the model's " +
                     std::to_string(config.vocab_size) + ", received " + std::to_string(file.vocab_size()));
  }
  LlamaForCausalLM model(config);
  auto load_options = shoestring::LoadOptions()
                          .quantize(options.quantize)
                          .nested(options.nested())
                          .dtype(options.dtype == "bf16" ? at::kBFloat16 : at::kFloat)
                          // Older model files contain the tensor inv_freq, which follows from rope_theta.
                          .ignore({"inv_freq"});
  if (options.quantize != "int8") load_options.block_size(options.block_size);
  if (config.tied) load_options.ignore({"inv_freq", "lm_head.weight"});
  shoestring::load_model(*model, options.model, load_options);
  model->model->recompute_layers = !options.no_recompute;
  return model;
}

// Returns the mean loss over all positions of `rows`, which are tokens (rows, tokens + 1).
Tensor loss_of(LlamaForCausalLM& model, const Tensor& rows, const Options& options) {
  const int64_t tokens = rows.size(1) - 1;
  const Tensor hidden = model(rows.narrow(1, 0, tokens)), target = rows.narrow(1, 1, tokens);
  return shoestring::linear_cross_entropy(
      hidden, model->output_weight(), target, std::nullopt,
      shoestring::LinearCrossEntropyOptions().workspace_mb(options.workspace_mb));
}

double validate(LlamaForCausalLM& model, const Blocks& blocks, const Options& options) {
  const torch::NoGradGuard no_grad;
  const int64_t count = std::min(blocks.count, kValidationBatches * options.batch_size);
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += options.batch_size) {
    std::vector<int64_t> numbers;
    for (int64_t i = begin; i < std::min(begin + options.batch_size, count); ++i) numbers.push_back(i);
    total +=
        loss_of(model, blocks.rows(numbers), options).item<double>() * static_cast<double>(numbers.size());
  }
  return total / static_cast<double>(count);
}

void require_finite(const char* what, double value, int64_t step) {
  if (std::isfinite(value)) return;
  throw InputError("step " + std::to_string(step + 1) + ": the " + what + " is " +
                   (std::isnan(value) ? "nan" : "infinite") +
                   "; training stopped before the weights changed; lower --lr or set --clip");
}

void train(LlamaForCausalLM& model, const Blocks& blocks, const Options& options, Result& result) {
  std::vector<Tensor> trained;
  for (const Tensor& p : model->parameters()) {
    if (!p.requires_grad()) continue;
    // With --keep-memory, allocate the gradients before training, so that they leave no holes between later
    // temporaries.
    trained.push_back(p);
    if (options.keep_memory) p.mutable_grad() = at::zeros_like(p);
  }
  // Mapping new pages takes the system about as long as the computation on these pages. So --keep-memory
  // keeps freed blocks below 32 MiB in the heap for the next training step.
  if (options.keep_memory) ::mallopt(M_MMAP_THRESHOLD, 32 << 20);
  const auto defaults = shoestring::optim::AdamWOptions(options.lr).weight_decay(options.weight_decay);
  const auto plus = shoestring::lora::GroupOptions().lr_ratio(options.lr_ratio);
  shoestring::optim::AdamW optimizer(shoestring::lora::parameter_groups(*model, defaults, plus), defaults);
  std::vector<double> highest;
  for (auto& group : optimizer.param_groups()) highest.push_back(group.options().get_lr());
  const double limit = options.clip > 0 ? options.clip : std::numeric_limits<double>::infinity();
  BatchOrder order(blocks.count, options.batch_size, options.seed);
  Progress progress(options.steps, options.batch_size * options.seq_len * options.accumulate);
  for (int64_t step = 0; step < options.steps; ++step) {
    const auto began = std::chrono::steady_clock::now();
    for (size_t i = 0; i < highest.size(); ++i) {
      const double lr = learning_rate(step, options.steps, options.warmup, highest[i]);
      optimizer.param_groups()[i].options().set_lr(lr);
    }
    double loss = 0;
    for (int64_t i = 0; i < options.accumulate; ++i) {
      const Tensor part = loss_of(model, blocks.rows(order.batch(step * options.accumulate + i)), options) /
                          options.accumulate;
      require_finite("loss", part.item<double>(), step);
      loss += part.item<double>();
      part.backward();
    }
    require_finite("gradient norm", torch::nn::utils::clip_grad_norm_(trained, limit), step);
    optimizer.step();
    optimizer.zero_grad(/*set_to_none=*/!options.keep_memory);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    progress.show(step + 1, loss, seconds.count());
    result.losses.push_back(loss);
  }
  result.tokens_per_second = progress.tokens_per_second();
}

void write_json(const std::string& path, const Result& result) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (!file) throw InputError("--json " + path + ": cannot write");
  std::string losses;
  for (double loss : result.losses) losses += (losses.empty() ? "" : ", ") + c10::str(loss);
  std::fprintf(file,
               "{\"validation_loss_before\": %.9g, \"validation_loss\": %.9g, \"losses\": [%s], "
               "\"tokens_per_second\": %.6g, "
               "\"peak_bytes\": %lld, \"loaded_bytes\": %lld, \"libtorch_bytes\": %lld}\n",
               result.validation_before, result.validation_after, losses.c_str(), result.tokens_per_second,
               static_cast<long long>(result.peak), static_cast<long long>(result.loaded),
               static_cast<long long>(result.libtorch));
  std::fclose(file);
}

void write_logits(const std::string& path, LlamaForCausalLM& model, const Blocks& blocks) {
  const torch::NoGradGuard no_grad;
  const Tensor tokens = blocks.rows({0}).narrow(1, 0, blocks.seq_len);
  shoestring::TensorDict tensors;
  tensors.insert("tokens", tokens);
  tensors.insert("logits", at::linear(model(tokens), model->output_weight()));
  shoestring::save_safetensors(path, tensors);
}

void run(const Options& options) {
  if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
  Result result;
  result.libtorch = peak_memory();
  const TokenFile file(options.data);
  const auto [blocks, held_out] = split(file, options.seq_len);
  std::optional<FolderLock> lock;
  if (options.steps > 0) lock.emplace(options.out);
  LlamaForCausalLM model = load(options, file);
  result.loaded = peak_memory();
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  result.validation_before = result.validation_after = validate(model, held_out, options);
  std::printf("validation loss %.7f, loaded in %lld MiB, of which %lld MiB are LibTorch itself\n",
              result.validation_before, static_cast<long long>(result.loaded >> 20),
              static_cast<long long>(result.libtorch >> 20));
  if (options.steps > 0) {
    const auto names = shoestring::lora::apply(
        *model,
        shoestring::lora::LoraOptions()
            .adapter(
                shoestring::nn::AdapterOptions().rank(options.rank).alpha(options.alpha).init(options.init))
            .target_modules(options.target_modules()));
    std::printf("adapters of rank %lld on %zu layers, %d threads\n", static_cast<long long>(options.rank),
                names.size(), at::get_num_threads());
    train(model, blocks, options, result);
    result.validation_after = validate(model, held_out, options);
    shoestring::lora::save_adapter(*model, options.out);
    std::printf("validation loss %.7f, %.0f tokens/s\nsaved %s\n", result.validation_after,
                result.tokens_per_second, options.out.c_str());
  }
  if (!options.logits.empty()) write_logits(options.logits, model, held_out);
  result.peak = peak_memory();
  std::printf("peak %lld MiB\n", static_cast<long long>(result.peak >> 20));
  if (!options.json.empty()) write_json(options.json, result);
}

int report(const std::string& message) {
  const bool beside_progress = ::isatty(STDOUT_FILENO) && ::isatty(STDERR_FILENO);
  std::fprintf(stderr, "%serror: %s\n", beside_progress ? "\n" : "",
               message.substr(0, message.find('\n')).c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  // By default, glibc raises M_MMAP_THRESHOLD up to 32 MiB when large blocks are freed. Temporaries are then
  // allocated between tensors that stay, and the memory of the temporaries never returns to the system. A
  // fixed threshold keeps large temporaries in pages of their own.
  ::mallopt(M_MMAP_THRESHOLD, 128 << 10);
  try {
    shoestring::install_autograd_engine();
    run(parse_options(argc, argv));
    return 0;
  } catch (const c10::Error& error) {
    return report(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return report(error.what());
  }
}
