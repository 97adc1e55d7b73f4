#include "catch.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <shoestring/optim.h>

using namespace shoestring::optim;
using at::Tensor;
using Catch::Contains;

TEST_CASE("update_batch_norm computes the mean over batches and restores the module", "[batch_norm]") {
  at::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(7, 300), torch::nn::BatchNorm1d(300),
                              torch::nn::Linear(300, 2));
  model->train();
  model->ptr(2)->eval();
  auto* layer = dynamic_cast<torch::nn::BatchNorm1dImpl*>(model->ptr(1).get());
  layer->options.momentum(0.3);
  const std::vector<Tensor> batches = {at::randn({8, 7}), at::randn({8, 7}) * 3};
  const auto run = [&] {
    for (const Tensor& batch : batches) {
      CHECK(model->ptr(2)->is_training());
      CHECK_FALSE(model->forward(batch).requires_grad());
    }
  };
  const auto check_modes = [&] {
    CHECK(model->is_training());
    CHECK_FALSE(model->ptr(2)->is_training());
    CHECK(layer->options.momentum() == 0.3);
  };
  update_batch_norm(*model, run);
  check_modes();
  const at::NoGradGuard no_grad;
  auto* linear = dynamic_cast<torch::nn::LinearImpl*>(model->ptr(0).get());
  Tensor mean = at::zeros({300}), variance = at::zeros({300});
  for (const Tensor& batch : batches) {
    mean += linear->forward(batch).mean(0) / 2;
    variance += linear->forward(batch).var(0) / 2;
  }
  CHECK(at::allclose(layer->running_mean, mean, 1e-5, 1e-6));
  CHECK(at::allclose(layer->running_var, variance, 1e-5, 1e-6));
  CHECK(layer->num_batches_tracked.item<int64_t>() == 2);

  const Tensor before = layer->running_mean.clone();
  CHECK_THROWS_AS(update_batch_norm(*model,
                                    [&] {
                                      run();
                                      throw std::runtime_error("no more batches");
                                    }),
                  std::runtime_error);
  check_modes();
  CHECK(at::equal(layer->running_mean, before));
  CHECK_THROWS_WITH(update_batch_norm(*model, [] {}),
                    Contains("update_batch_norm: forward: expected at least one batch"));
  check_modes();
  CHECK(at::equal(layer->running_mean, before));
  bool ran = false;
  update_batch_norm(*linear, [&] { ran = true; });
  CHECK_FALSE(ran);
}
