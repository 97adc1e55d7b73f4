// Runs commands on a small model with adapters, for tests/python/adapters/test_lora_cpp.py:
//
//   adapter_file BASE TOKENS COMMAND=ARGUMENT ...
//
// BASE is a model file for load_model. TOKENS is a safetensors file with the model's input, "ids". The
// program runs the commands in the order in which they are given:
//   quantize=nf4  seed=3  apply=rank:4,init:pissa,...  load=DIR[,NAME]  set=A+B  train=STEPS  save=DIR
//   prompt=DIR[,LOAD]  prefix=DIR[,LOAD]  projected=DIR[,LOAD]  eva=RHO  merge=A+B  unmerge=1  delete=NAME
//   forward=FILE  rows=FILE,A,none,...  base=FILE

#include <cstdio>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <shoestring/adapters/lora.h>
#include <shoestring/adapters/virtual_tokens.h>
#include <shoestring/files/safetensors.h>
#include <shoestring/integrations/model_files.h>

namespace adapter_file {

namespace {

using at::Tensor;
namespace lora = shoestring::lora;
namespace nn = shoestring::nn;

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) parts.push_back(part);
  return parts;
}

struct Block : torch::nn::Module {
  nn::AdaptableLinear up{nullptr}, down{nullptr};
  Block() {
    up = register_module("up_proj", nn::AdaptableLinear(nn::AdaptableLinearOptions(32, 64)));
    down = register_module("down_proj", nn::AdaptableLinear(nn::AdaptableLinearOptions(64, 32).bias(false)));
  }
  Tensor forward(const Tensor& x) { return x + down(at::silu(up(x))); }
};

struct Model : torch::nn::Module {
  nn::AdaptableEmbedding embed{nullptr};
  nn::AdaptableConv1d mix{nullptr};
  torch::nn::Linear head{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  Model() {
    embed = register_module("embed", nn::AdaptableEmbedding(20, 32));
    mix = register_module("mix", nn::AdaptableConv1d(torch::nn::Conv1dOptions(32, 32, 3).padding(1)));
    for (const char* name : {"first", "second"})
      blocks.push_back(register_module(name, std::make_shared<Block>()));
    head = register_module("head", torch::nn::Linear(32, 7));
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = embed(ids);
    x = x + mix(x.transpose(1, 2)).transpose(1, 2);
    for (auto& block : blocks) x = block->forward(x);
    return head(x);
  }
};

lora::ApplyOptions parse(const std::string& text) {
  lora::ApplyOptions options;
  nn::LoraOptions adapter;
  nn::VeraOptions vera;
  nn::IA3Options ia3;
  std::string method = "lora";
  for (const auto& pair : split(text, ',')) {
    const auto field = split(pair, ':');
    const std::string &key = field[0], &value = field[1];
    if (key == "name") options.adapter_name(value);
    if (key == "targets") options.target_modules(split(value, '+'));
    if (key == "quantize") options.quantize(value);
    if (key == "method") method = value;
    if (key == "feedforward") ia3.feedforward_modules(split(value, '+'));
    if (key == "save") options.modules_to_save(split(value, '+'));
    if (key == "bias") options.bias(value);
    if (key == "rank") adapter.rank(std::stoll(value)), vera.rank(std::stoll(value));
    if (key == "alpha") adapter.alpha(std::stod(value));
    if (key == "init") adapter.init(value);
    if (key == "iterations") adapter.loftq_iterations(std::stoll(value));
    if (key == "dora") adapter.dora(true);
    if (key == "rslora") adapter.rslora(true);
    if (key == "lora_bias") adapter.lora_bias(true);
  }
  if (method == "ia3") return options.adapter(ia3);
  return method == "vera" ? options.adapter(vera) : options.adapter(adapter);
}

void train(Model& model, const Tensor& ids, int steps) {
  std::vector<Tensor> trained;
  for (const auto& parameter : model.parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  torch::optim::SGD optimizer(trained, 0.3);
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    model.forward(ids).square().mean().backward();
    optimizer.step();
  }
}

void write(const std::string& path, const Tensor& y) {
  shoestring::TensorDict tensors;
  tensors.insert("y", y.contiguous());
  shoestring::save_safetensors(path, tensors);
}

void run(const std::vector<std::string>& arguments) {
  Model model;
  shoestring::load_model(model, arguments[0]);
  const Tensor ids = shoestring::load_safetensors(arguments[1])["ids"];
  const auto output = [&] {
    const torch::NoGradGuard no_grad;
    const bool training = model.is_training();
    model.eval();
    const Tensor y = model.forward(ids);
    model.train(training);
    return y;
  };
  for (size_t i = 2; i < arguments.size(); ++i) {
    const auto at = arguments[i].find('=');
    const std::string command = arguments[i].substr(0, at), argument = arguments[i].substr(at + 1);
    const auto parts = split(argument, ',');
    if (command == "quantize") {
      for (auto& block : model.blocks) block->up->quantize(), block->down->quantize();
    }
    if (command == "seed") at::manual_seed(std::stoull(argument));
    if (command == "apply") lora::apply(model, parse(argument));
    if (command == "load") lora::load_adapter(model, parts[0], parts.size() > 1 ? parts[1] : "default");
    if (command == "set") lora::set_adapter(model, split(argument, '+'));
    if (command == "train") train(model, ids, std::stoi(argument));
    if (command == "save") lora::save_adapter(model, argument);
    if (command == "merge") lora::merge(model, lora::MergeOptions().adapter_names(split(argument, '+')));
    if (command == "unmerge") lora::unmerge(model);
    if (command == "prompt") {
      nn::PromptTokens prompt(5, 64);
      if (parts.size() > 1) prompt->load(parts[1]);
      prompt->save(parts[0]);
    }
    if (command == "prefix" || command == "projected") {
      auto sizes = nn::PrefixTokensOptions(5, 2, 2, 16).projection(command == "projected").hidden_size(24);
      nn::PrefixTokens prefix(sizes);
      if (parts.size() > 1) prefix->load(parts[1]);
      prefix->save(parts[0]);
    }
    if (command == "eva")
      lora::initialize_eva(
          model,
          [&](const lora::ChooseRows& choose) {
            choose(ids != 0);
            for (int batch = 0; batch < 2; ++batch) output();
          },
          lora::EvaOptions().rho(std::stod(argument)));
    if (command == "delete") lora::delete_adapter(model, argument);
    if (command == "forward") write(argument, output());
    if (command == "base") {
      const lora::DisableAdapterGuard guard(model);
      write(argument, output());
    }
    if (command == "rows") {
      std::vector<std::optional<std::string>> rows;
      for (size_t row = 1; row < parts.size(); ++row)
        rows.push_back(parts[row] == "none" ? std::nullopt : std::optional(parts[row]));
      const lora::AdaptersPerRowGuard guard(model, rows);
      write(parts[0], output());
    }
  }
}

}  // namespace

int program(int argc, char** argv) {
  if (argc < 3) return 2;
  try {
    run({argv + 1, argv + argc});
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  }
}

}  // namespace adapter_file
