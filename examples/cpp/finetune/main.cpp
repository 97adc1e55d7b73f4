// Fine-tunes a Llama from Hugging Face with QLoRA, in C++ alone. The weights are loaded one tensor at a time
// and quantised on the device. The loss never stores the logits. PEFT can load the resulting adapter.

#include <ATen/Parallel.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>
#include <malloc.h>
#include <shoestring/adapters/lora.h>
#include <shoestring/checkpoint/autograd.h>
#include <shoestring/checkpoint/offload_weights.h>
#include <shoestring/core/host_allocator.h>
#include <shoestring/files/safetensors.h>
#include <shoestring/integrations/model_files.h>
#include <torch/utils.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config.h"
#include "data.h"
#include "device.h"
#include "folder_lock.h"
#include "forward.h"
#include "input_error.h"
#include "model.h"
#include "optimizers.h"
#include "options.h"
#include "planned.h"
#include "trainer.h"

using at::Tensor;

namespace {

struct Result {
  std::optional<double> validation_before, validation_after;  // nullopt if no data is held out
  Speed speed;
  std::vector<double> losses;
  // Peak memory of the process in bytes: at its start, after the model is loaded, and at the end.
  int64_t libtorch = 0, loaded = 0, peak = 0;
  std::map<std::string, int64_t> device;  // memory of the device at the end, in bytes
  std::map<std::string, int64_t>
      weights;  // with --offload-weights: bytes that were read, and where weights are
};

// Lets the weights of a model leave while it is loaded: the embedding and the output layer as soon as they
// are read, and each decoder layer as soon as its last tensor is.
class LeavingWeights {
 public:
  LeavingWeights(LlamaForCausalLM& model, shoestring::OffloadWeights& weights)
      : model_(model), weights_(weights) {}

  void loaded(const std::string& name) {
    constexpr std::string_view kLayers = "model.layers.";
    const int64_t layer = name.starts_with(kLayers) ? std::stoll(name.substr(kLayers.size())) : -1;
    if (layer != layer_) finish();
    layer_ = layer;
    if (name == "model.embed_tokens.weight") take_table(model_->model->embed_tokens->weight);
    if (name == "lm_head.weight") take_table(model_->output_weight());
  }
  // Lets the layer leave whose tensors came last.
  void finish() {
    if (layer_ < 0) return;
    std::vector<Tensor> leaving;
    auto& layer = *model_->model->layers[static_cast<size_t>(layer_)];
    for (Tensor& p : layer.parameters()) leaving.push_back(p.requires_grad_(false));
    for (const Tensor& buffer : layer.buffers()) leaving.push_back(buffer);
    // Small weights, such as those of norms, stay.
    std::erase_if(leaving, [](const Tensor& t) { return !t.has_storage() || t.nbytes() < kLeast; });
    weights_.add(leaving);
    layer_ = -1;
  }

 private:
  static constexpr size_t kLeast = 64 << 10;
  void take_table(Tensor weight) { weights_.add_table(weight.requires_grad_(false)); }

  LlamaForCausalLM& model_;
  shoestring::OffloadWeights& weights_;
  int64_t layer_ = -1;
};

LlamaForCausalLM load(const FinetuneOptions& options, const TokenFile& file, at::Device device,
                      shoestring::OffloadWeights* weights) {
  const LlamaConfig config = read_config(options.model);
  if (file.vocab_size() > config.vocab_size) {
    throw InputError("--data " + options.data + ": expected a vocabulary of at most the model's " +
                     std::to_string(config.vocab_size) + ", got " + std::to_string(file.vocab_size()));
  }
  planned_layers(options, config.layers);  // refuses a plan of another model before it is loaded
  LlamaForCausalLM model(config);
  auto load_options = shoestring::LoadOptions()
                          .quantize(options.quantize)
                          .double_quant(options.double_quant())
                          .dtype(base_dtype(options))
                          .device(device)
                          // Older model files contain the tensor inv_freq, which follows from rope_theta.
                          .ignore({"inv_freq"});
  if (options.quantize != "int8") load_options.block_size(options.block_size);
  if (weights == nullptr) {
    shoestring::load_model(*model, options.model, load_options);
    return model;
  }
  LeavingWeights leaving(model, *weights);
  load_options.loaded([&](const std::string& name) { leaving.loaded(name); });
  shoestring::load_model(*model, options.model, load_options);
  leaving.finish();
  return model;
}

// Adds the adapters. Returns the parameters to train.
std::vector<Tensor> add_adapters(LlamaForCausalLM& model, const FinetuneOptions& options) {
  const auto names = shoestring::lora::apply(
      *model,
      shoestring::lora::ApplyOptions()
          .adapter(shoestring::nn::LoraOptions().rank(options.rank).alpha(options.alpha).init(options.init))
          .target_modules(options.targets()));
  std::vector<Tensor> trained;
  for (const Tensor& p : model->parameters()) {
    if (!p.requires_grad()) continue;
    p.set_data(p.to(weight_dtype(options)));
    trained.push_back(p);
  }
  std::printf("adapters of rank %lld on %zu layers, %d threads\n", static_cast<long long>(options.rank),
              names.size(), at::get_num_threads());
  return trained;
}

void train(LlamaForCausalLM& model, const Split& data, const FinetuneOptions& options, Forward& forward,
           const Processes& alone, Result& result) {
  const auto trained = add_adapters(model, options);
  if (options.keep_memory) {
    // Allocate the gradients before training, so that they leave no holes between later temporaries.
    for (const Tensor& p : trained) p.mutable_grad() = at::zeros_like(p);
    // Mapping new pages takes the system about as long as the computation on these pages. So --keep-memory
    // keeps freed blocks below 32 MiB in the heap for the next training step.
    ::mallopt(M_MMAP_THRESHOLD, 32 << 20);
  }
  const auto plus = shoestring::lora::LoraPlusOptions().lr_ratio(options.lr_ratio);
  Optimizers optimizers(shoestring::lora::loraplus_param_groups(*model, options.lr, plus), {}, options,
                        alone);
  Trainer trainer{options, forward, optimizers, alone, data, trained, options.keep_memory};
  trainer.on_reading = [&](const Reading& reading) { result.losses.push_back(reading.loss); };
  const auto is_last = [&](int64_t step) { return step == options.steps; };
  result.speed = trainer.fit(0, is_last, [](int64_t) {});
  result.validation_after = trainer.validate();
}

std::string json(std::optional<double> number) {
  char text[32] = "null";
  if (number) std::snprintf(text, sizeof text, "%.9g", *number);
  return text;
}

void write_json(const std::string& path, const Result& result) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  const auto require = [&](bool done) {
    if (!done) throw InputError("--json " + path + ": cannot write: " + std::strerror(errno));
  };
  require(file != nullptr);
  std::string losses;
  for (double loss : result.losses) losses += (losses.empty() ? "" : ", ") + c10::str(loss);
  std::string device;
  for (const auto& [name, bytes] : result.device)
    device += c10::str(", \"device_", name, "_bytes\": ", bytes);
  for (const auto& [name, bytes] : result.weights)
    device += c10::str(", \"weights_", name, "_bytes\": ", bytes);
  const bool printed =
      std::fprintf(file,
                   "{\"validation_loss_before\": %s, \"validation_loss\": %s, \"losses\": [%s], "
                   "\"tokens_per_second\": %.6g, \"data_seconds\": %.6g, "
                   "\"peak_bytes\": %lld, \"loaded_bytes\": %lld, \"libtorch_bytes\": %lld%s}\n",
                   json(result.validation_before).c_str(), json(result.validation_after).c_str(),
                   losses.c_str(), result.speed.tokens_per_second, result.speed.data_seconds,
                   static_cast<long long>(result.peak), static_cast<long long>(result.loaded),
                   static_cast<long long>(result.libtorch), device.c_str()) >= 0;
  require(std::fclose(file) == 0 && printed);
}

void write_logits(const std::string& path, Forward& forward, const Blocks& blocks) {
  const Tensor tokens = blocks.rows({0}).narrow(1, 0, blocks.seq_len);
  shoestring::TensorDict tensors;
  tensors.insert("tokens", tokens);
  tensors.insert("logits", forward.logits(tokens));
  shoestring::save_safetensors(path, tensors);
}

void run(const FinetuneOptions& options) {
  const Processes alone;
  if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
  const at::Device device = find_device(options);
  if (options.host_allocator && device.is_cpu()) shoestring::host_allocator::enable();
  Result result;
  result.libtorch = peak_memory();
  const TokenFile file(options.data);
  const Split data = split(file, options.seq_len, options.val_fraction);
  std::optional<FolderLock> lock;
  if (options.steps > 0) lock.emplace(options.out);
  std::optional<shoestring::OffloadWeights> weights;
  if (options.weights_leave()) {
    if (options.weights_folder().empty() && device.is_cpu()) {
      throw InputError(
          "--offload-weights cpu: expected nvme:DIR on the CPU, whose weights are in host memory already");
    }
    weights.emplace(shoestring::OffloadWeightsOptions()
                        .device(device.str())
                        .folder(options.weights_folder())
                        .keep(bytes_of(options.keep)));
  }
  LlamaForCausalLM model = load(options, file, device, weights ? &*weights : nullptr);
  result.loaded = peak_memory();
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  Forward forward(model, options, device, alone, weights ? &*weights : nullptr);
  if (data.validation.count > 0) {
    result.validation_before = result.validation_after = forward.validate(data.validation);
    std::printf("validation loss %.7f, ", *result.validation_before);
  }
  std::printf("loaded on %s in %lld MiB, of which %lld MiB are LibTorch itself\n", device.str().c_str(),
              static_cast<long long>(result.loaded >> 20), static_cast<long long>(result.libtorch >> 20));
  if (options.steps > 0) {
    train(model, data, options, forward, alone, result);
    shoestring::lora::save_adapter(*model, options.out);
    if (result.validation_after) std::printf("validation loss %.7f, ", *result.validation_after);
    std::printf("%s\nsaved %s\n", result.speed.text().c_str(), options.out.c_str());
  }
  if (!options.logits.empty()) write_logits(options.logits, forward, data.validation);
  result.peak = peak_memory();
  result.device = device_memory(device);
  if (weights) result.weights = weights->statistics();
  std::printf("%s\n", memory_text(device).c_str());
  if (!options.json.empty()) write_json(options.json, result);
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
    return report_error("finetune", error.what_without_backtrace());
  } catch (const std::exception& error) {
    return report_error("finetune", error.what());
  }
}
