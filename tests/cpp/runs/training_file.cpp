// Continues a training run that Python has saved, for tests/python/runs/test_training_file.py:
//
//   training_file OPTIMIZER FILE STEPS [OPTIMIZER FILE STEPS ...]
//
// OPTIMIZER is AdamW (of shoestring::optim), torch.AdamW or torch.SGD. The program restores FILE, takes STEPS
// steps with random data of the restored generator, and overwrites FILE. It prints the step and the position.

#include <cstdio>
#include <memory>
#include <string>

#include <shoestring/optim.h>
#include <shoestring/runs/training.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace training_file {

using namespace shoestring;

namespace {

std::unique_ptr<torch::optim::Optimizer> make(const std::string& name,
                                              const std::vector<at::Tensor>& params) {
  if (name == "AdamW") return std::make_unique<optim::AdamW>(params, optim::AdamWOptions(1.0));
  if (name == "torch.AdamW")
    return std::make_unique<torch::optim::AdamW>(params, torch::optim::AdamWOptions(1.0));
  return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(1.0));
}

void run(const std::string& name, const std::string& path, int steps) {
  torch::nn::Sequential model(torch::nn::Linear(torch::nn::LinearOptions(8, 16).bias(false)),
                              torch::nn::BatchNorm1d(16), torch::nn::Dropout(0.3), torch::nn::Linear(16, 2));
  const auto optimizer = make(name, model->parameters());
  optim::Scheduler scheduler(*optimizer,
                             {{"lr", optim::schedules::cosine(optim::ScheduleOptions(20).warmup(3))}});
  optim::ReduceOnPlateau plateau(*optimizer, optim::ReduceOnPlateauOptions().patience(1));
  TrainingRun training{
      training_tensors(*model), {optimizer.get()}, {{"schedule", scheduler}, {"plateau", plateau}}};
  training.facts = {{"data", "abc"}};
  load_training(path, training);
  for (int i = 0; i < steps; ++i) {
    optimizer->zero_grad();
    const at::Tensor loss = model->forward(at::randn({32, 8})).square().mean();
    loss.backward();
    optimizer->step();
    scheduler.step();
    plateau.step(1.0);
    ++training.step;
    ++training.position["row"];
  }
  save_training(path, training);
  std::printf("%lld %lld\n", static_cast<long long>(training.step),
              static_cast<long long>(training.position["row"]));
}

}  // namespace

int program(int argc, char** argv) {
  if (argc < 4 || argc % 3 != 1) return 2;
  try {
    for (char** a = argv + 1; a < argv + argc; a += 3) run(a[0], a[1], std::stoi(a[2]));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace training_file
