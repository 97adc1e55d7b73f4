// Tests tiles of a layer's weight, of which two are on the device at a time.
#include "catch.h"

#include <torch/nn/modules/linear.h>

#include <ATen/ATen.h>

#include "folder.h"

#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/checkpoint/offload_weights.h>
#include <shoestring/optim.h>

using at::Tensor;
using Catch::Contains;
using shoestring::OffloadWeights;
using shoestring::OffloadWeightsOptions;
using shoestring::optim::AdamW;
using shoestring::optim::AdamWOptions;

namespace {

// Whole numbers, whose products and sums are exact in any order.
Tensor whole_numbers(at::IntArrayRef shape) { return at::randint(-3, 4, shape).to(at::kFloat); }

// Splits the parameters of a layer into layers of their own.
std::vector<torch::nn::Linear> tiles_of(const torch::nn::Linear& layer, int64_t tiles) {
  const int64_t columns = layer->weight.size(1);
  const auto begins = shoestring::tile_rows(layer->weight.size(0), columns, tiles);
  std::vector<torch::nn::Linear> parts;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    const int64_t count = begins[i + 1] - begins[i];
    parts.emplace_back(torch::nn::Linear(columns, count));
    parts.back()->weight.copy_(layer->weight.narrow(0, begins[i], count));
    parts.back()->bias.copy_(layer->bias.narrow(0, begins[i], count));
  }
  return parts;
}

}  // namespace

TEST_CASE("tiles of a weight begin at multiples of 256 elements where that is possible", "[tiled_weights]") {
  CHECK(shoestring::tile_rows(1000, 64, 3) == std::vector<int64_t>{0, 332, 664, 1000});
  CHECK(shoestring::tile_rows(5, 24, 3) == std::vector<int64_t>{0, 1, 3, 5});
  CHECK(shoestring::tile_rows(7, 512, 7) == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK_THROWS_WITH(shoestring::tile_rows(3, 8, 4),
                    Contains("tile_rows: tiles: expected 1 to the number of rows (3), received 4"));
}

TEST_CASE("a layer in tiles that are in a file trains to the same bits", "[tiled_weights]") {
  const auto tiles = GENERATE(int64_t{1}, int64_t{2}, int64_t{5});
  const bool input_has_gradient = GENERATE(false, true);
  const auto folder = Folder();
  at::manual_seed(3);
  torch::nn::Linear layer(64, 100);
  const Tensor gradient = whole_numbers({6, 100});
  auto parts = tiles_of(layer, tiles);
  OffloadWeights offload(OffloadWeightsOptions().folder(folder.path));
  std::vector<Tensor> trained;
  int64_t largest = 0;
  for (const auto& part : parts) {
    offload.add({}, {part->weight, part->bias});
    for (const Tensor& p : part->parameters()) trained.push_back(p);
    largest = std::max(largest, static_cast<int64_t>(part->weight.nbytes()) + 2 * 4096);
  }
  AdamW plain(layer->parameters(), AdamWOptions(1e-2).state_format("8bit")),
      tiled(trained, AdamWOptions(1e-2).state_format("8bit"));
  plain.set_step_in_backward(true), tiled.set_step_in_backward(true);
  int64_t most = 0;
  std::vector<std::function<Tensor(const Tensor&)>> functions;
  for (size_t i = 0; i < parts.size(); ++i) {
    functions.emplace_back([&, i](const Tensor& x) {
      const Tensor y = offload.run(static_cast<int64_t>(i), x, [&](const Tensor& input) {
        most = std::max(most, offload.statistics().at("device"));
        return parts[i]->forward(input);
      });
      y.register_hook([&](const Tensor&) { most = std::max(most, offload.statistics().at("device")); });
      return y;
    });
  }
  for (int step = 0; step < 3; ++step) {
    const Tensor batch = whole_numbers({6, 64});
    const Tensor x = batch.clone().requires_grad_(input_has_gradient), y = x.detach().clone();
    layer->forward(x).mul(gradient).sum().backward();
    const Tensor input = y.requires_grad_(input_has_gradient);
    shoestring::tiled_outputs(functions, input).mul(gradient).sum().backward();
    if (input_has_gradient) CHECK(at::allclose(input.grad(), x.grad(), 1e-5, 1e-5));
    plain.step(), tiled.step();
  }
  CHECK(most <= 3 * largest);  // one of the three is being written
  offload.restore();
  std::vector<Tensor> weights, biases;
  for (const auto& part : parts) weights.push_back(part->weight), biases.push_back(part->bias);
  CHECK(at::cat(weights).equal(layer->weight));
  CHECK(at::cat(biases).allclose(layer->bias, 1e-3, 1e-3));  // blocks of the state of a bias are not aligned
}

TEST_CASE("the gradient of a 16-bit input of tiles is rounded once", "[tiled_weights]") {
  const auto folder = Folder();
  at::manual_seed(4);
  const Tensor weight = at::randn({512, 64}).to(at::kBFloat16), batch = at::randn({8, 64}).to(at::kBFloat16),
               gradient = at::randn({8, 512}).to(at::kBFloat16);
  const Tensor exact = at::matmul(gradient.to(at::kDouble), weight.to(at::kDouble));
  OffloadWeights offload(OffloadWeightsOptions().folder(folder.path));
  std::vector<std::function<Tensor(const Tensor&)>> functions;
  int64_t most = 0;
  std::vector<Tensor> parts;
  for (const Tensor& rows : weight.split(64)) parts.push_back(rows.clone());
  for (size_t i = 0; i < parts.size(); ++i) {
    offload.add({parts[i]});
    functions.emplace_back([&, i](const Tensor& x) {
      const Tensor y = offload.run(static_cast<int64_t>(i), x,
                                   [&](const Tensor& input) { return at::linear(input, parts[i]); });
      y.register_hook([&](const Tensor&) { most = std::max(most, offload.statistics().at("device")); });
      return y;
    });
  }
  const Tensor x = batch.clone().requires_grad_(true), whole = batch.clone().requires_grad_(true);
  at::linear(whole, weight).backward(gradient);
  shoestring::tiled_outputs(functions, x).backward(gradient);
  const auto error = [&](const Tensor& grad) {
    return (grad.to(at::kDouble) - exact).abs().max().item<double>();
  };
  CHECK(error(x.grad()) <= error(whole.grad()) + 8 * exact.abs().max().item<double>() / 512);
  CHECK(most == 2 * 64 * 64 * 2);
}
