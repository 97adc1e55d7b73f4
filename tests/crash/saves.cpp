// Saves and loads files for tests/crash/test_saves.py. It reads commands from stdin and answers each with one
// line:
//
//   save NAME FOLDER old|new N EXCHANGES
//     saves in a forked process that kill_at.cpp kills before its N-th counted system call, unless N is 0
//     answer: killed CALLS | saved CALLS | failed CALLS, where CALLS is the number of counted system calls
//   check NAME FOLDER
//     loads the files of the folder
//     answer: old | new | mixed VALUE | refused MESSAGE

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <shoestring/adapters/lora.h>
#include <shoestring/files/safetensors.h>
#include <shoestring/integrations/model_files.h>
#include <shoestring/optim.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

namespace crash_saves {

namespace {

using at::Tensor;
namespace lora = shoestring::lora;
namespace nn = shoestring::nn;

struct Model : torch::nn::Module {
  nn::AdaptableLinear up{nullptr}, down{nullptr};
  Model() {
    up = register_module("up", nn::AdaptableLinear(nn::AdaptableLinearOptions(8, 16).bias(false)));
    down = register_module("down", nn::AdaptableLinear(nn::AdaptableLinearOptions(16, 8).bias(false)));
  }
  void fill(double value) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.fill_(value);
  }
};

// Returns the value that all elements of all tensors have, or NaN if they differ.
double value_of(const std::vector<Tensor>& tensors) {
  double value = tensors.at(0).flatten()[0].item<double>();
  for (const Tensor& tensor : tensors) value = tensor.eq(value).all().item<bool>() ? value : std::nan("");
  return value;
}

std::string verdict(double value) {
  return value == 1 ? "old" : value == 2 ? "new" : "mixed " + std::to_string(value);
}

struct Save {
  // Writes the files into a folder. value is 1 for the old state of the files, and 2 for the new state.
  std::function<void(const std::string& folder, double value)> save;
  std::function<double(const std::string& folder)> load;
};

void save_shards(const std::string& folder, double value) {
  for (const char* name : {"up", "down"}) {
    shoestring::TensorDict tensors;
    tensors.insert(std::string(name) + ".weight",
                   at::full(name[0] == 'u' ? at::IntArrayRef{16, 8} : at::IntArrayRef{8, 16}, value));
    shoestring::save_safetensors(
        folder + "/model-0000" + (name[0] == 'u' ? "1" : "2") + "-of-00002.safetensors", tensors);
  }
  std::ofstream(folder + "/model.safetensors.index.json")
      << R"({"weight_map": {"up.weight": "model-00001-of-00002.safetensors", "down.weight": "model-00002-of-00002.safetensors"}})";
}

// Saves an adapter whose tensors have the same shapes in the old and the new state; only the configuration
// file contains alpha. A mixture of old and new files therefore loads, unless the reader detects it.
void save_adapter(const std::string& folder, double value) {
  Model model;
  lora::apply(model, lora::ApplyOptions().adapter(nn::LoraOptions().rank(4).alpha(value == 1 ? 4 : 32)));
  for (nn::AdaptableLinear layer : {model.up, model.down}) {
    const torch::NoGradGuard no_grad;
    (*layer->adapters["default"])["lora_A"].fill_(0.5);
    (*layer->adapters["default"])["lora_B"].fill_(value);
  }
  lora::save_adapter(model, folder + "/adapter");
}

double load_adapter(const std::string& folder) {
  Model model;
  model.fill(0);
  lora::load_adapter(model, folder + "/adapter", "default", /*any_base=*/true);
  const torch::NoGradGuard no_grad;
  const double up = value_of({model.up(at::ones({1, 8}))}), down = value_of({model.down(at::ones({1, 16}))});
  // Expected outputs are alpha / 4 * lora_B * lora_A * ones: 16 and 32 for the old adapter, 256 and 512 for
  // the new one.
  return up == 16 && down == 32 ? 1 : up == 256 && down == 512 ? 2 : up;
}

void save_optimizer(const std::string& folder, double value) {
  Tensor weight = at::zeros({300}).requires_grad_();
  shoestring::optim::AdamW optimizer({weight}, shoestring::optim::AdamWOptions(0.1 * value));
  for (int step = 0; step < static_cast<int>(value); ++step) {
    weight.mutable_grad() = at::ones({300});
    optimizer.step();
  }
  shoestring::optim::save_optimizer(optimizer, folder + "/optimizer.safetensors");
}

double load_optimizer(const std::string& folder) {
  Tensor weight = at::zeros({300}).requires_grad_();
  shoestring::optim::AdamW optimizer({weight}, shoestring::optim::AdamWOptions(1));
  shoestring::optim::load_optimizer(optimizer, folder + "/optimizer.safetensors");
  const auto& options =
      static_cast<const shoestring::optim::AdamWOptions&>(optimizer.param_groups()[0].options());
  const shoestring::SafetensorsFile file(folder + "/optimizer.safetensors");
  return options.lr() == 0.1 * file.load("0.0.step").item<double>() ? options.lr() / 0.1 : std::nan("");
}

const std::map<std::string, Save>& saves() {
  static const std::map<std::string, Save> all{
      {"safetensors",
       {[](const std::string& folder, double value) {
          shoestring::TensorDict tensors;
          for (const char* name : {"a", "b"}) tensors.insert(name, at::full({1000}, value));
          shoestring::save_safetensors(folder + "/file.safetensors", tensors);
        },
        [](const std::string& folder) {
          const auto tensors = shoestring::load_safetensors(folder + "/file.safetensors");
          return value_of({tensors["a"], tensors["b"]});
        }}},
      {"model",  // The old model has two shards, and the new model replaces one of them.
       {[](const std::string& folder, double value) {
          if (value == 1) return save_shards(folder, value);
          Model model;
          model.fill(value);
          shoestring::save_model(model, folder);
        },
        [](const std::string& folder) {
          Model model;
          shoestring::load_model(model, folder);
          return value_of({model.up->weight, model.down->weight});
        }}},
      {"adapter", {save_adapter, load_adapter}},
      {"optimizer", {save_optimizer, load_optimizer}}};
  return all;
}

std::string save(const std::string& name, const std::string& folder, double value, long n, bool exchanges) {
  static const auto kill_at = reinterpret_cast<void (*)(long, bool)>(::dlsym(RTLD_DEFAULT, "kill_at"));
  static const auto calls_counted = reinterpret_cast<long (*)()>(::dlsym(RTLD_DEFAULT, "calls_counted"));
  TORCH_CHECK(kill_at != nullptr && calls_counted != nullptr, "expected libkill_at.so in LD_PRELOAD");
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      kill_at(n, exchanges);
      saves().at(name).save(folder, value);
      ::_exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(1);
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  return (killed ? "killed " : status == 0 ? "saved " : "failed ") + std::to_string(calls_counted());
}

std::string check(const std::string& name, const std::string& folder) {
  try {
    return verdict(saves().at(name).load(folder));
  } catch (const c10::Error& error) {
    std::string text = error.what_without_backtrace();
    std::replace(text.begin(), text.end(), '\n', ' ');
    return "refused " + text;
  }
}

}  // namespace

int program(int, char**) {
  at::set_num_threads(1);  // one thread, because forked processes do not inherit PyTorch's worker threads
  for (std::string line; std::getline(std::cin, line);) {
    std::stringstream words(line);
    std::string command, name, folder, version;
    long n = 0;
    bool exchanges = true;
    words >> command >> name >> folder >> version >> n >> exchanges;
    std::cout << (command == "save" ? save(name, folder, version == "old" ? 1 : 2, n, exchanges)
                                    : check(name, folder))
              << std::endl;
  }
  return 0;
}

}  // namespace crash_saves
