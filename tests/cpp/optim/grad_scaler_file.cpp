// Trains with GradScaler, for tests/python/optim/test_grad_scaler.py, which does the same in Python:
//
//   grad_scaler_file OPTIMIZER UNSCALES MAX_NORM FOLDER [OPTIMIZER UNSCALES MAX_NORM FOLDER ...]
//
// OPTIMIZER is SGD (LibTorch's), or AdamW or AdamW-8bit (of shoestring::optim). If UNSCALES is 1, unscale_
// runs before each step, and clip_grad_norm_ clips the gradients to MAX_NORM unless MAX_NORM is 0. Otherwise
// AdamW clips within the step.
//
// FOLDER has three files. params.safetensors has the weights, named by their index. grads.safetensors has the
// gradients, named "<step>.<micro-batch>.<index>". scaler.safetensors has the scaler's state. The program
// writes the weights and the scaler's state after each step to steps.safetensors, named "<step>.<name>", and
// overwrites scaler.safetensors.

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include <shoestring/files/safetensors.h>
#include <shoestring/optim.h>

namespace grad_scaler_file {

using namespace shoestring::optim;

namespace {

void run(const std::string& name, bool unscales, double max_norm, const std::string& folder) {
  std::vector<at::Tensor> params;
  {
    const shoestring::SafetensorsFile file(folder + "/params.safetensors");
    while (file.contains(std::to_string(params.size())))
      params.push_back(file.load(std::to_string(params.size())).requires_grad_());
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (name == "SGD") {
    optimizer = std::make_unique<torch::optim::SGD>(
        params, torch::optim::SGDOptions(0.1).momentum(0.5).weight_decay(0.3));
  } else {
    auto own = std::make_unique<AdamW>(
        params, AdamWOptions(0.01).weight_decay(0.3).state_format(name == "AdamW" ? "fp32" : "8bit"));
    if (!unscales && max_norm > 0) own->set_max_grad_norm(max_norm);
    optimizer = std::move(own);
  }
  GradScaler scaler;
  scaler.load_state(shoestring::load_safetensors(folder + "/scaler.safetensors"));
  const shoestring::SafetensorsFile gradients(folder + "/grads.safetensors");
  shoestring::TensorDict steps;
  for (int step = 0; gradients.contains(std::to_string(step) + ".0.0"); ++step) {
    const std::string prefix = std::to_string(step) + ".";
    optimizer->zero_grad();
    for (int micro = 0; gradients.contains(prefix + std::to_string(micro) + ".0"); ++micro) {
      at::Tensor loss = at::zeros({});
      for (size_t i = 0; i < params.size(); ++i) {
        const auto key = prefix + std::to_string(micro) + "." + std::to_string(i);
        loss = loss + (params[i] * gradients.load(key)).sum();
      }
      scaler.scale(loss).backward();
    }
    if (unscales) scaler.unscale_(*optimizer);
    if (unscales && max_norm > 0) torch::nn::utils::clip_grad_norm_(params, max_norm);
    scaler.step(*optimizer);
    scaler.update();
    for (size_t i = 0; i < params.size(); ++i)
      steps.insert(prefix + std::to_string(i), params[i].detach().clone());
    for (const auto& field : scaler.state()) steps.insert(prefix + field.key(), field.value());
  }
  shoestring::save_safetensors(folder + "/steps.safetensors", steps);
  shoestring::save_safetensors(folder + "/scaler.safetensors", scaler.state());
}

}  // namespace

int program(int argc, char** argv) {
  if (argc < 5 || argc % 4 != 1) return 2;
  try {
    for (char** a = argv + 1; a < argv + argc; a += 4) run(a[0], a[1][0] == '1', std::stod(a[2]), a[3]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace grad_scaler_file
