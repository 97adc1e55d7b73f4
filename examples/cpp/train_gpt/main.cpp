// Trains a Llama-style model from scratch on a token file, in C++ alone. shoestring provides the loss, which
// never stores the logits, and the optimizer, whose state takes 2 bytes per parameter instead of 8. With
// --baseline, LibTorch's own loss and optimizer are used instead.

#include <ATen/Parallel.h>
#include <shoestring/checkpoint/autograd.h>
#include <shoestring/core/host_allocator.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>

#include "checkpoint.h"
#include "data.h"
#include "device.h"
#include "folder_lock.h"
#include "forward.h"
#include "input_error.h"
#include "model.h"
#include "optimizers.h"
#include "options.h"
#include "processes.h"
#include "signals.h"
#include "trainer.h"

using at::Tensor;

namespace {

LlamaConfig config_of(const TrainOptions& options, const TokenFile& file, at::Device device) {
  LlamaConfig config{.vocab_size = file.vocab_size(),
                     .hidden = options.hidden,
                     .intermediate = 3 * options.hidden,
                     .layers = options.layers,
                     .heads = options.heads,
                     .kv_heads = options.kv_heads,
                     .head_dim = options.hidden / options.heads,
                     .max_tokens = std::max<int64_t>(options.seq_len, 2048)};
  config.experts = options.experts;
  config.top_k = options.top_k;
  config.device = device;
  config.dtype = weight_dtype(options);
  return config;
}

Optimizers make_optimizers(LlamaForCausalLM& model, const TrainOptions& options, const Processes& processes) {
  shoestring::lora::ParameterGroup matrices{{}, options.lr, true}, norms{{}, options.lr, false};
  for (const Tensor& p : model->parameters()) (p.dim() >= 2 ? matrices : norms).params.push_back(p);
  return Optimizers({matrices, norms}, {model->model->embed_tokens->weight, model->output_weight()}, options,
                    processes);
}

void train(const TrainOptions& options) {
  if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
  const at::Device device = find_device(options);
  Processes processes(options, device);
  if (options.host_allocator && device.is_cpu()) shoestring::host_allocator::enable();
  const int64_t libtorch = peak_memory();
  const TokenFile file(options.data);
  const Split data = split(file, options.seq_len, options.val_fraction);
  std::optional<FolderLock> lock;
  if (processes.is_first()) lock.emplace(options.out);
  if (!options.resume && has_checkpoint(options.out)) {
    throw InputError("--out " + options.out +
                     ": holds a run already; continue it with --resume or give another --out");
  }
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  LlamaConfig config = config_of(options, file, device);
  config.on_block = [&](torch::nn::Module& block) {
    // The output layer reads the weight of the embedding once more.
    processes.add_block(block.parameters(), /*keep=*/block.as<torch::nn::Embedding>() != nullptr);
  };
  LlamaForCausalLM model(config);
  Optimizers optimizers = make_optimizers(model, options, processes);
  processes.begin(*model, optimizers.all());
  int64_t parameters = 0;
  for (const Tensor& p : model->parameters()) parameters += p.numel();
  shoestring::TrainingRun run{
      shoestring::training_tensors(*model), optimizers.all(), {{"scaler", optimizers.scaler()}}};
  run.facts = options.deciding;
  run.facts["data"] = file.fingerprint();
  if (options.resume) load_checkpoint(options.out, run);
  const int64_t start = run.step;
  const auto most = [&](int64_t number) { return std::ranges::max(processes.of_all(number)); };
  const int64_t newest = most(start);
  if (start != newest) {
    throw InputError("--resume " + options.out + ": expected a checkpoint of step " + std::to_string(newest) +
                     ", which other processes have, got step " + std::to_string(start));
  }
  if (processes.is_first()) remove_unfinished(options.out);
  std::printf("%.1f M parameters, %lld tokens, vocabulary %lld, %s on %s, %d threads%s\n",
              static_cast<double>(parameters) / 1e6, static_cast<long long>(file.size()),
              static_cast<long long>(file.vocab_size()), options.baseline ? "plain LibTorch" : "shoestring",
              device.str().c_str(), at::get_num_threads(),
              start > 0 ? (", from step " + std::to_string(start)).c_str() : "");
  std::fflush(stdout);

  Forward forward(model, options, device, processes);
  Trainer trainer{options, forward, optimizers, processes, data, model->parameters()};
  trainer.remains = [&] {
    return has_checkpoint(options.out) ? "; the last checkpoint in " + options.out + " is kept"
                                       : std::string();
  };
  trainer.on_reading = [&](const Reading& reading) {
    if (reading.step == start + 1) tell_wait(reading.seconds);
  };
  std::optional<DeferredSignals> signals(std::in_place);
  int signal = 0;
  const auto due = [&](int64_t step) {
    signal = static_cast<int>(most(signals->received()));  // the processes stop after the same step
    return signal != 0 || step % options.checkpoint_every == 0 || step == options.steps;
  };
  const Speed speed = trainer.fit(start, due, [&](int64_t step) {
    run.step = step;
    processes.save([&] { save_checkpoint(options.out, run); });
    if (signal != 0) throw Interrupted(signal, step);
  });
  signal = static_cast<int>(most(signals->received()));
  if (signal != 0) throw Interrupted(signal, options.steps);
  // The checkpoint of the last step has been saved, so a later signal ends the program at once.
  signals.reset();
  const auto validation = trainer.validate();
  processes.present([&] { save_model(options.out, model->tensors(), config.json()); });
  std::string peaks;
  for (const int64_t bytes : processes.of_all(peak_memory()))
    peaks += (peaks.empty() ? "" : ", ") + std::to_string(bytes >> 20);
  if (validation) std::printf("validation loss %.6f, ", *validation);
  std::printf("%s, %s, of which %lld MiB are LibTorch itself\n", speed.text().c_str(),
              memory_text(device).c_str(), static_cast<long long>(libtorch >> 20));
  if (processes.count() > 1) std::printf("peak of the processes: %s MiB\n", peaks.c_str());
  std::printf("saved %s/model.safetensors\n", options.out.c_str());
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
    return report_error("train_gpt", error.what_without_backtrace());
  } catch (const std::exception& error) {
    return report_error("train_gpt", error.what());
  }
}
