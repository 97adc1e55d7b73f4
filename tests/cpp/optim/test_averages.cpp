#include "catch.h"

#include <chrono>
#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <shoestring/files/safetensors.h>
#include <shoestring/optim.h>

#include "data/queue_device.h"
#include "folder.h"

using namespace shoestring::optim;
using at::Tensor;
using Catch::Contains;

namespace {

torch::nn::Sequential averaged_model() {
  return torch::nn::Sequential(torch::nn::Linear(7, 300), torch::nn::BatchNorm1d(300),
                               torch::nn::Linear(300, 2));
}

void move_weights(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (const Tensor& p : module.parameters()) p.add_(at::randn_like(p), 0.1);
  for (const Tensor& b : module.buffers()) b.is_floating_point() ? b.mul_(1.5) : b.add_(1);
}

std::vector<Tensor> float_tensors(const torch::nn::Module& module) {
  std::vector<Tensor> found;
  for (const Tensor& p : module.parameters()) found.push_back(p.detach());
  for (const Tensor& b : module.buffers()) {
    if (b.is_floating_point()) found.push_back(b);
  }
  return found;
}

std::vector<Tensor> copies(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> found;
  for (const Tensor& t : tensors) found.push_back(t.clone());
  return found;
}

bool are_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return at::equal(x, y); });
}

}  // namespace

TEST_CASE("Averages follow the fp64 average", "[averages]") {
  at::manual_seed(0);
  for (const std::string kind : {"ema", "swa", "lawa"}) {
    auto model = averaged_model();
    Averages averages(*model, AveragesOptions(kind).decay(0.75).last(3));
    std::vector<Tensor> exact;
    std::vector<std::vector<Tensor>> history;
    for (int step = 0; step < 9; ++step) {
      move_weights(*model);
      averages.update();
      std::vector<Tensor> weights;
      for (const Tensor& t : float_tensors(*model)) weights.push_back(t.to(at::kDouble));
      history.push_back(weights);
      const double kept = step == 0 ? 0 : kind == "ema" ? 0.75 : step / (step + 1.0);
      if (step == 0) exact = copies(weights);
      for (size_t i = 0; i < weights.size(); ++i) exact[i] = exact[i] * kept + weights[i] * (1 - kept);
    }
    if (kind == "lawa") {
      for (size_t i = 0; i < exact.size(); ++i)
        exact[i] = (history[6][i] + history[7][i] + history[8][i]) / 3;
    }
    CHECK(averages.updates() == 9);
    const auto swapped = averages.swap();
    const auto found = float_tensors(*model);
    for (size_t i = 0; i < found.size(); ++i) {
      // At most three roundings of the largest weight in each of nine steps.
      const double largest =
          history.back()[i].abs().max().item<double>() + exact[i].abs().max().item<double>();
      CHECK((found[i].to(at::kDouble) - exact[i]).abs().max().item<double>() <=
            27 * std::exp2(-24) * (largest + 1));
    }
  }
}

TEST_CASE("SwappedWeights restores the training weights, also when an exception is thrown", "[averages]") {
  at::manual_seed(0);
  auto model = averaged_model();
  Averages averages(*model, AveragesOptions().decay(0.5));
  averages.update();
  move_weights(*model);
  averages.update();
  move_weights(*model);
  const auto before = copies(float_tensors(*model));
  const auto counter = model->buffers().back().item<int64_t>();
  try {
    const auto swapped = averages.swap();
    CHECK_FALSE(are_equal(float_tensors(*model), before));
    CHECK(model->buffers().back().item<int64_t>() == counter - 1);
    CHECK_THROWS_WITH(averages.update(), Contains("Averages: update: expected the training weights"));
    CHECK_THROWS_WITH(averages.swap(), Contains("Averages: swap: expected the training weights"));
    throw std::runtime_error("evaluation failed");
  } catch (const std::runtime_error&) {
  }
  CHECK(are_equal(float_tensors(*model), before));
  CHECK(model->buffers().back().item<int64_t>() == counter);
  {
    auto swapped = averages.swap();
    auto moved = std::move(swapped);
    moved.restore();
    CHECK(are_equal(float_tensors(*model), before));
    moved.restore();
  }
  averages.update();
  CHECK(averages.updates() == 3);
}

TEST_CASE("Averages resume bit for bit from a file, and copy to another module", "[averages]") {
  for (const std::string kind : {"ema", "swa", "lawa"}) {
    for (const std::string format : {"fp32", "bf16"}) {
      const auto options = AveragesOptions(kind).decay(0.9).format(format).every(2).last(2);
      at::manual_seed(0);
      auto model = averaged_model(), other = averaged_model(), third = averaged_model();
      Averages averages(*model, options);
      for (int step = 0; step < 5; ++step) {
        move_weights(*model);
        averages.update();
      }
      const Folder folder;
      shoestring::save_safetensors(folder / "state.safetensors", averages.state());
      Averages resumed(*model, options);
      resumed.load_state(shoestring::load_safetensors(folder / "state.safetensors"));
      CHECK(resumed.updates() == 2);
      for (int step = 0; step < 3; ++step) {
        move_weights(*model);
        averages.update();
        resumed.update();
      }
      averages.copy_to(*other);
      resumed.copy_to(*third);
      CHECK(are_equal(float_tensors(*other), float_tensors(*third)));
      CHECK(other->buffers().back().item<int64_t>() == model->buffers().back().item<int64_t>());
      CHECK(resumed.state()["steps"].item<int64_t>() == 8);
      Averages foreign(*averaged_model()->ptr(0));
      CHECK_THROWS_WITH(foreign.load_state(averages.state()), Contains("Averages: load_state: "));
    }
  }
}

TEST_CASE("Averages raise one error for weights that change and for invalid options", "[averages]") {
  auto model = averaged_model();
  model->ptr(2)->parameters()[0].set_requires_grad(false);
  Averages averages(*model);
  averages.update();
  CHECK_FALSE(averages.state().contains("average.2.weight"));
  CHECK(averages.state().contains("average.2.bias"));
  CHECK(averages.state().contains("copy.1.num_batches_tracked"));
  model->ptr(2)->parameters()[0].set_requires_grad(true);
  CHECK_THROWS_WITH(averages.update(), Contains("Averages: 2.weight: expected a frozen parameter"));
  model->ptr(2)->parameters()[0].set_requires_grad(false);
  model->to(at::kBFloat16);
  CHECK_THROWS_WITH(averages.update(), Contains("Averages: 0.weight: expected Float [300, 7] on cpu"));
  CHECK(averages.updates() == 1);
  CHECK_THROWS_WITH(Averages(*model, AveragesOptions("mean")),
                    Contains("Averages: kind: expected ema, swa or lawa, received mean"));
  CHECK_THROWS_WITH(Averages(*model, AveragesOptions().decay(1)),
                    Contains("Averages: decay: expected a number in [0, 1), received 1"));
}

TEST_CASE("Averages of tied tensors by name are computed once", "[averages]") {
  const Tensor shared = at::ones({3}).requires_grad_();
  shoestring::TensorDict parameters;
  parameters.insert("a", shared);
  parameters.insert("b", shared);
  Averages averages(parameters, AveragesOptions().decay(0.5));
  averages.update();
  shared.detach().fill_(2);
  averages.update();
  CHECK(at::equal(averages.state()["average.a"], at::full({3}, 1.5)));
  CHECK_FALSE(averages.state().contains("average.b"));
}

TEST_CASE("Averages on a thread of the CPU are those of weights on the CPU", "[averages]") {
  const c10::Device device = queue_device::install();
  for (const std::string kind : {"ema", "swa", "lawa"}) {
    for (const std::string format : {"fp32", "bf16"}) {
      at::manual_seed(0);
      const shoestring::TensorDict shapes = [] {
        shoestring::TensorDict tensors;
        tensors.insert("a", at::randn({300, 7}));
        tensors.insert("b", at::randn({5}).to(at::kBFloat16));
        tensors.insert("c", at::randn({3, 4}).t());
        return tensors;
      }();
      shoestring::TensorDict far, near;
      for (const auto& item : shapes) {
        far.insert(item.key(), item.value().to(device).requires_grad_());
        near.insert(item.key(), item.value().clone().requires_grad_());
      }
      const auto options = AveragesOptions(kind).decay(0.75).last(2).format(format);
      Averages averages(far, AveragesOptions(options).offload("cpu")), expected(near, options);
      for (int step = 0; step < 5; ++step) {
        for (const auto& item : shapes) {
          // The weights arrive on the device some time after update() has begun.
          const Tensor value = at::randn_like(item.value());
          far[item.key()].detach().copy_(queue_device::compute(value.to(device), 0.005),
                                         /*non_blocking=*/true);
          near[item.key()].detach().copy_(value);
        }
        averages.update();
        expected.update();
      }
      const auto state = averages.state(), other = expected.state();
      REQUIRE(state.keys() == other.keys());
      for (const auto& item : other) CHECK(at::equal(state[item.key()], item.value()));
      const Tensor before = near["a"].detach().clone();
      {
        const auto swapped = averages.swap(), also = expected.swap();
        for (const auto& item : near) CHECK(at::equal(far[item.key()].detach().cpu(), item.value().detach()));
        CHECK_FALSE(at::equal(near["a"].detach(), before));
      }
      CHECK(at::equal(far["a"].detach().cpu(), before));
      if (format == "bf16") {
        CHECK_THROWS_WITH(Averages(far, options),
                          Contains("Averages: a: expected CPU or CUDA for the format bf16"));
      }
    }
  }
}

TEST_CASE("An update on a thread of the CPU does not wait for the device", "[averages]") {
  const c10::Device device = queue_device::install();
  shoestring::TensorDict parameters;
  parameters.insert("a", at::zeros({5}).to(device).requires_grad_());
  Averages averages(parameters, AveragesOptions().offload("cpu"));
  const Tensor value = at::full({5}, 3.0).to(device);
  const auto start = std::chrono::steady_clock::now();
  parameters["a"].detach().copy_(queue_device::compute(value, 1.0), /*non_blocking=*/true);
  averages.update();
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(700));
  parameters["a"].detach().fill_(4);  // runs in the stream after the copy of the update
  CHECK(at::equal(averages.state()["average.a"], at::full({5}, 3.0)));
}
