// Feeds damaged files to the functions of the C++ library that read files (readers). Compiled with
// AddressSanitizer and UndefinedBehaviorSanitizer:
//
//   fuzz_readers SEED SECONDS FOLDER
//
// In each case the reader must load the file, or raise the documented exception with a message of one line.
// The program prints a line for each reader. Any other exception, a report of a sanitizer or a case of more
// than 20 s ends the program with a message that names the reader and the case. FOLDER then contains the
// damaged file.

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>

#include <sanitizer/common_interface_defs.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <shoestring/adapters/lora.h>
#include <shoestring/files/safetensors.h>
#include <shoestring/integrations/model_files.h>
#include <shoestring/nn.h>
#include <shoestring/optim.h>
#include <shoestring/planning/plan_training.h>
#include <shoestring/runs/training.h>

#include "common/data.h"
#include "common/input_error.h"
#include "finetune/config.h"
#include "mutate.h"

namespace {

namespace lora = shoestring::lora;
namespace nn = shoestring::nn;
using at::Tensor;
using fuzz::Random;
using Mutator = std::function<std::string(const std::string&, Random&)>;

struct Block : torch::nn::Module {
  Block() {
    register_module("up_proj", nn::AdaptableLinear(nn::AdaptableLinearOptions(8, 64)));
    register_module("down_proj", nn::AdaptableLinear(nn::AdaptableLinearOptions(64, 8).bias(false)));
  }
};

struct Model : torch::nn::Module {
  Model() {
    for (const char* name : {"first", "second"}) register_module(name, std::make_shared<Block>());
    register_module("head", torch::nn::Linear(8, 5));
  }
};

struct Pair : torch::nn::Module {
  Pair() {
    register_module("up", nn::AdaptableLinear(nn::AdaptableLinearOptions(64, 8)));
    register_module("down", nn::AdaptableLinear(nn::AdaptableLinearOptions(8, 64)));
  }
};

struct Reader {
  std::string name;
  std::function<void(const std::string&)> make;  // writes a valid set of the reader's files into a folder
  std::vector<std::pair<std::string, Mutator>> files;
  std::function<void(const std::string&)> load;
  size_t fewest = 20;
};

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Writes the weights as PEFT does, without shoestring's digest of the configuration. With the digest, a
// reader would refuse every damaged configuration.
void drop_digest(const std::string& folder) {
  const std::string weights = folder + "/adapter_model.safetensors";
  shoestring::TensorDict tensors;
  const shoestring::SafetensorsFile file(weights);
  for (const auto& entry : file.entries()) tensors.insert(entry.name, file.load(entry.name));
  shoestring::save_safetensors(weights, tensors, {{"format", "pt"}});
}

void make_adapter(const std::string& folder, const std::string& kind) {
  Model model;
  auto options = lora::ApplyOptions().target_modules({"up_proj", "down_proj"});
  if (kind == "lora") options.adapter(nn::LoraOptions().rank(2)).modules_to_save({"head"}).bias("all");
  if (kind == "vera") options.adapter(nn::VeraOptions().rank(4).save_projection(false));
  if (kind == "ia3") options.adapter(nn::IA3Options().feedforward_modules({"down_proj"}));
  lora::apply(model, options);
  lora::save_adapter(model, folder);
  auto config = fuzz::Json::parse(read(folder + "/adapter_config.json"));
  if (kind == "lora") config["alpha_pattern"] = {{"(?=.*up).*_proj", 3}, {"first\\.(down|up)_proj", 5.5}};
  if (kind == "ia3") config["feedforward_modules"] = ".*\\.(down|gate)_proj";
  write(folder + "/adapter_config.json", config.dump());
  drop_digest(folder);
}

Reader adapter(const std::string& kind) {
  return {
      "lora::load_adapter " + kind,
      [kind](const std::string& folder) { make_adapter(folder, kind); },
      {{"adapter_config.json", fuzz::mutate_json}, {"adapter_model.safetensors", fuzz::mutate_safetensors}},
      [](const std::string& folder) {
        Model model;
        lora::load_adapter(model, folder);
      }};
}

template <class Tokens>
Reader tokens(const std::string& name, const std::function<Tokens()>& make) {
  return {
      name + "::load",
      [make](const std::string& folder) {
        make()->save(folder);
        drop_digest(folder);
      },
      {{"adapter_config.json", fuzz::mutate_json}, {"adapter_model.safetensors", fuzz::mutate_safetensors}},
      [make](const std::string& folder) { make()->load(folder); }};
}

template <class Optimizer, class Options>
Reader optimizer(const std::string& name) {
  const auto params = [] {
    std::vector<Tensor> made = {at::ones({20, 20}), at::ones({5})};
    for (auto& p : made) p.requires_grad_().mutable_grad() = at::ones_like(p);
    return made;
  };
  return {"optim::load_optimizer " + name,
          [params](const std::string& folder) {
            Optimizer made(params(), Options());
            made.step();
            shoestring::optim::save_optimizer(made, folder + "/optimizer.safetensors");
          },
          {{"optimizer.safetensors", fuzz::mutate_safetensors}},
          [params](const std::string& folder) {
            Optimizer made(params(), Options());
            shoestring::optim::load_optimizer(made, folder + "/optimizer.safetensors");
            made.step();
          }};
}

// A run with both kinds of optimizers and a part.
struct Run {
  Run()
      : adamw({linear->weight}), adam({linear->bias}),
        scheduler(adamw, {{"lr", shoestring::optim::schedules::cosine(20)}}) {
    for (const Tensor& p : linear->parameters()) p.mutable_grad() = at::ones_like(p);
    adamw.step();
    adam.step();
  }
  shoestring::TrainingRun all() {
    return {shoestring::training_tensors(*linear), {&adamw, &adam}, {{"schedule", scheduler}}};
  }
  torch::nn::Linear linear{8, 5};
  shoestring::optim::AdamW adamw;
  torch::optim::Adam adam;
  shoestring::optim::Scheduler scheduler;
};

Reader training() {
  return {
      "load_training",
      [](const std::string& folder) { shoestring::save_training(folder + "/run.safetensors", Run().all()); },
      {{"run.safetensors", fuzz::mutate_safetensors}},
      [](const std::string& folder) {
        Run run;
        auto all = run.all();
        shoestring::load_training(folder + "/run.safetensors", all);
      }};
}

Reader model(const std::string& quantize) {
  return {"load_model " + quantize,
          [quantize](const std::string& folder) {
            Pair pair;
            shoestring::save_model(pair, folder);
            if (quantize == "dense") return;
            const bool nested = quantize == "nf4";
            shoestring::load_model(pair, folder,
                                   shoestring::LoadOptions().quantize(quantize).double_quant(nested));
            shoestring::save_model(pair, folder);
          },
          {{"model.safetensors", fuzz::mutate_safetensors}},
          [](const std::string& folder) {
            Pair pair;
            shoestring::load_model(pair, folder);
          }};
}

std::vector<Reader> readers() {
  return {
      {"SafetensorsFile",
       [](const std::string& folder) {
         shoestring::TensorDict tensors;
         for (const auto type : {at::kFloat, at::kBFloat16, at::kLong, at::kBool, at::kByte}) {
           tensors.insert(c10::str("x.", type), at::ones({3, 4}, type));
         }
         shoestring::save_safetensors(folder + "/model.safetensors", tensors, {{"format", "pt"}});
       },
       {{"model.safetensors", fuzz::mutate_safetensors}},
       [](const std::string& folder) {
         const shoestring::SafetensorsFile file(folder + "/model.safetensors");
         for (const auto& entry : file.entries()) file.load(entry.name);
       }},
      {"load_safetensors",
       [](const std::string& folder) {
         shoestring::TensorDict one, two;
         one.insert("a", at::ones({3}));
         two.insert("b", at::ones({4}));
         shoestring::save_safetensors(folder + "/one.safetensors", one);
         shoestring::save_safetensors(folder + "/two.safetensors", two);
         write(
             folder + "/model.safetensors.index.json",
             R"({"metadata": {"total_size": 28}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})");
       },
       {{"model.safetensors.index.json", fuzz::mutate_json}, {"one.safetensors", fuzz::mutate_safetensors}},
       [](const std::string& folder) { shoestring::load_safetensors(folder); }},
      model("dense"),
      model("nf4"),
      model("int4"),
      model("int8"),
      adapter("lora"),
      adapter("ia3"),
      adapter("vera"),
      tokens<nn::PromptTokens>("nn::PromptTokens", [] { return nn::PromptTokens(3, 8); }),
      tokens<nn::PrefixTokens>("nn::PrefixTokens",
                               [] { return nn::PrefixTokens(nn::PrefixTokensOptions(3, 2, 2, 8)); }),
      optimizer<shoestring::optim::AdamW, shoestring::optim::AdamWOptions>("AdamW"),
      optimizer<shoestring::optim::Adafactor, shoestring::optim::AdafactorOptions>("Adafactor"),
      training(),
      {"TokenFile",
       [](const std::string& folder) {
         std::string data = std::string("shoetok\1", 8) + std::string("\x2c\x01\0\0\2\0\0\0", 8) +
                            std::string("\x20\0\0\0\0\0\0\0", 8) + std::string(40, '\0');
         for (int i = 0; i < 32; ++i) data += std::string{static_cast<char>(i), 0};
         write(folder + "/tokens.bin", data);
       },
       {{"tokens.bin", fuzz::mutate_bytes}},
       [](const std::string& folder) {
         const TokenFile file(folder + "/tokens.bin");
         const int64_t half = file.size() / 2;
         std::vector<int64_t> rows(2 * half);
         file.read({0, half}, half, rows.data());
         file.fingerprint();
       }},
      {"TrainingPlan::load",
       [](const std::string& folder) {
         shoestring::TrainingPlan plan;
         plan.freedom = "exact", plan.precision = plan.weights = "fp32", plan.optimizer_state = "8bit";
         plan.adapters = plan.quantize = plan.offload = plan.weights_place = "none";
         plan.peak_bytes = 5;
         plan.tiles = {{"lm_head", 64}};
         plan.checkpoints = {{"layers.0", "keep", 0, 0}, {"layers.1", "recompute", 5, 0}};
         plan.phases = {{"loading", 5}};
         plan.reasons = {{"", "it fits"}};
         plan.alternatives = {{"rounding", {{"precision", "bf16"}}, 4, 1.5}};
         plan.frontier = {{5, 1.5, 1, 0}};
         plan.save(folder + "/plan.json");
       },
       {{"plan.json", fuzz::mutate_json}},
       [](const std::string& folder) { shoestring::TrainingPlan::load(folder + "/plan.json"); }},
      {"read_config",
       [](const std::string& folder) {
         write(
             folder + "/config.json",
             R"({"model_type": "llama", "hidden_act": "silu", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
                   "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
                   "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})");
       },
       {{"config.json", fuzz::mutate_json}},
       [](const std::string& folder) { read_config(folder); }},
  };
}

char running[256];  // the reader and the case that are running, for error messages

void say_case() { std::fprintf(stderr, "fuzz_readers: in %s\n", running); }

void too_long(int) {
  std::fprintf(stderr, "fuzz_readers: more than 20 s in %s\n", running);
  std::_Exit(1);
}

[[noreturn]] void fail(const std::string& reason) {
  std::fprintf(stderr, "fuzz_readers: %s: %s\n", running, reason.c_str());
  std::_Exit(1);
}

// Replaces a file by a pipe (kind 0), a folder (1) or a link to /dev/zero (2), or removes it (3).
void make_special(const std::string& path, size_t kind) {
  ::unlink(path.c_str());
  if (kind == 0) ::mkfifo(path.c_str(), 0600);
  if (kind == 1) ::mkdir(path.c_str(), 0700);
  if (kind == 2 && ::symlink("/dev/zero", path.c_str()) != 0) fail("symlink");
}

bool loads(const Reader& reader, const std::string& folder) {
  std::string message;
  try {
    ::alarm(20);
    reader.load(folder);
    ::alarm(0);
    return true;
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const InputError& error) {
    message = error.what();
  } catch (const std::exception& error) {
    fail(std::string("undocumented exception: ") + error.what());
  }
  ::alarm(0);
  if (message.find('\n') != std::string::npos || message.empty() || message.size() > 2000)
    fail("a message of one line: " + message.substr(0, 400));
  return false;
}

void run(const Reader& reader, uint64_t seed, double seconds, const std::string& folder) {
  ::mkdir(folder.c_str(), 0700);
  reader.make(folder);
  std::snprintf(running, sizeof running, "%s (sound input)", reader.name.c_str());
  std::vector<std::string> sound;
  for (const auto& file : reader.files) sound.push_back(read(folder + "/" + file.first));
  if (!loads(reader, folder)) fail("refuses its sound input");
  size_t cases = 0, loaded = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (; cases < reader.fewest || std::chrono::steady_clock::now() < end; ++cases) {
    std::seed_seq seeds{seed, std::hash<std::string>()(reader.name), static_cast<uint64_t>(cases)};
    Random rng(seeds);
    const size_t which = fuzz::below(rng, sound.size());
    const std::string path = folder + "/" + reader.files[which].first;
    const bool special = cases < 4;
    if (special) {
      make_special(path, cases);
    } else {
      write(path, reader.files[which].second(sound[which], rng));
    }
    std::snprintf(running, sizeof running, "%s, seed %llu, case %zu, %s", reader.name.c_str(),
                  static_cast<unsigned long long>(seed), cases, path.c_str());
    loaded += loads(reader, folder);
    if (special) std::remove(path.c_str());
    write(path, sound[which]);
  }
  std::printf("fuzz: C++ %s: %zu cases, %zu loaded, %zu refused, 0 failed\n", reader.name.c_str(), cases,
              loaded, cases - loaded);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  at::set_num_threads(1);
  std::signal(SIGALRM, too_long);
  __sanitizer_set_death_callback(say_case);
  const auto all = readers();
  for (size_t i = 0; i < all.size(); ++i) {
    run(all[i], std::strtoull(argv[1], nullptr, 10), std::atof(argv[2]) / double(all.size()),
        std::string(argv[3]) + "/" + std::to_string(i));
  }
  return 0;
}
