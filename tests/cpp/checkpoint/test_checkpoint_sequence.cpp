#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/modules/linear.h>

#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/checkpoint/checkpoint_sequence.h>
#include <shoestring/ops.h>

#include "checkpoint/memory_meter.h"
#include "emulated.h"
#include "folder.h"
#include "offload/disturb.h"

using at::Tensor;

namespace {

struct Layers {
  Layers() {
    for (int i = 0; i < 6; ++i) {
      torch::nn::Linear qkv(32, 96), up(32, 128), down(128, 32);
      for (const Tensor& p : {qkv->weight, up->weight, down->weight}) parameters.push_back(p);
      functions.push_back([=](const Tensor& x) mutable {
        const auto heads = qkv(x).view({1, -1, 3, 2, 16}).unbind(2);
        const auto by_head = [&](int i) { return heads[i].transpose(1, 2); };
        const Tensor y =
            shoestring::attention(by_head(0), by_head(1), by_head(2)).transpose(1, 2).reshape(x.sizes());
        return x + down(at::dropout(at::gelu(up(x + y)), 0.1, true));
      });
    }
    functions.push_back([](const Tensor& x) { return x.pow(2).sum(); });
  }
  std::vector<shoestring::BlockFunction> functions;
  std::vector<Tensor> parameters;
  std::vector<int64_t> kinds{0, 0, 0, 0, 0, 0, 1};
};

}  // namespace

TEST_CASE("a sequence keeps to its budget, with the gradients that it has without one", "[checkpoint]") {
  if (is_emulated()) return;  // this would take minutes, and cover no code that the CPU kernels leave out
  Layers layers;
  const Tensor x = torch::randn({128, 32}).requires_grad_();
  const auto gradients = [&](const shoestring::SequencePlan& plan) {
    torch::manual_seed(5);
    return torch::autograd::grad({shoestring::checkpoint_sequential(layers.functions, plan, x)},
                                 layers.parameters);
  };
  const auto free = shoestring::plan_sequential(layers.functions, x, int64_t{1} << 40, layers.kinds);
  for (const auto& name : free.names) CHECK(name == "keep");
  const auto expected = gradients(free);
  for (const double part : {0.7, 0.5}) {
    const auto plan = shoestring::plan_sequential(layers.functions, x,
                                                  static_cast<int64_t>(part * free.peak_bytes), layers.kinds);
    CHECK(plan.peak_bytes <= part * free.peak_bytes);
    CHECK(std::count(plan.names.begin(), plan.names.end(), "keep") < 7);
    const auto received = gradients(plan);
    for (size_t i = 0; i < expected.size(); ++i) CHECK(at::equal(received[i], expected[i]));
  }
  for (const Tensor& p : layers.parameters) CHECK(!p.grad().defined());
  torch::manual_seed(11);
  const Tensor next = torch::randn({2});
  torch::manual_seed(11);
  // To make a plan, plan_sequential runs each function once; this must not change the state of the random
  // number generator.
  shoestring::plan_sequential(layers.functions, x, int64_t{1} << 40);
  CHECK(at::equal(next, torch::randn({2})));
}

TEST_CASE("a plan leaves the gradients of a weight that two functions share", "[checkpoint]") {
  const Tensor weight = torch::randn({8, 8}).requires_grad_(), x = torch::randn({4, 8});
  const auto product = [weight](const Tensor& x) { return x.matmul(weight); };
  shoestring::plan_sequential({product, product}, x, int64_t{1} << 40);
  CHECK(!weight.grad().defined());
  weight.mutable_grad() = at::ones_like(weight);
  shoestring::plan_sequential({product, product}, x, int64_t{1} << 40);
  CHECK(at::equal(weight.grad(), at::ones_like(weight)));
}

TEST_CASE("a sequence that offloads keeps to its budget, however slow copies are, with the same gradients",
          "[checkpoint]") {
  if (is_emulated()) return;  // this would take minutes, and cover no code that the CPU kernels leave out
  Layers layers;
  const Folder folder;
  // The input x is so large that the short-lived gradients of the weights do not determine the memory peak.
  const Tensor x = torch::randn({256, 32}).requires_grad_();
  const auto step = [&](const shoestring::SequencePlan& plan, shoestring::OffloadActivations* offload) {
    for (const Tensor& p : layers.parameters) p.mutable_grad() = at::zeros_like(p);
    x.mutable_grad() = at::zeros_like(x);
    torch::manual_seed(5);
    const auto meter = c10::make_intrusive<shoestring::activations::MemoryMeter>();
    meter->begin(at::kCPU);
    shoestring::checkpoint_sequential(layers.functions, plan, x, offload).backward();
    meter->end();
    return meter->peak();
  };
  const auto gradients = [&] {
    std::vector<Tensor> all;
    for (const Tensor& p : layers.parameters) all.push_back(p.grad());
    return all;
  };
  const auto free = shoestring::plan_sequential(layers.functions, x, int64_t{1} << 40, layers.kinds);
  step(free, nullptr);
  const auto expected = gradients();
  auto recomputed = free;
  for (auto& name : recomputed.names) name = "recompute";
  // The peak memory, in bytes, of the plan that recomputes every function and offloads nothing.
  const int64_t least = step(recomputed, nullptr);
  for (const std::string& place : {std::string(), folder.path}) {
    const auto options = shoestring::OffloadActivationsOptions().device("cpu").folder(place);
    shoestring::OffloadActivations offload(options, layers.parameters);
    for (const int64_t budget : {free.peak_bytes * 45 / 100, least * 96 / 100}) {
      const auto plan = shoestring::plan_sequential(layers.functions, x, budget, layers.kinds, &offload);
      const auto moves = [](const std::string& name) { return name.find("offload") != name.npos; };
      CHECK((budget > least || std::any_of(plan.names.begin(), plan.names.end(), moves)));
      for (const int64_t delay : {0, 3000}) {
        shoestring::offload::io::disturb({.max_delay_us = delay});
        const int64_t peak = step(plan, &offload);
        shoestring::offload::io::disturb({});
        CAPTURE(place, budget, delay, peak, plan.peak_bytes, plan.names);
        // The measured peak may exceed the budget by 2%: in a small model, allocations that the plan ignores
        // are a larger fraction of the peak.
        CHECK(peak <= 1.02 * budget);
        CHECK(peak <= 1.05 * plan.peak_bytes);
        // Copies that are quicker than those that the plan measured free their bytes earlier than planned.
        // Slow copies keep as many bytes pending as the plan allows.
        if (delay > 0) CHECK(peak >= 0.95 * plan.peak_bytes);
        const auto received = gradients();
        for (size_t i = 0; i < expected.size(); ++i) CHECK(at::equal(received[i], expected[i]));
      }
      CHECK(offload.statistics().at("entries") == 0);
    }
    auto plan = free;
    plan.names[2] = "offload";
    CHECK_THROWS_WITH(shoestring::checkpoint_sequential(layers.functions, plan, x),
                      Catch::Matchers::Contains("offload: expected the OffloadActivations that the plan was "
                                                "made with, received none, but function 2 is \"offload\""));
  }
}

TEST_CASE("errors of sequences", "[checkpoint]") {
  Layers layers;
  const Tensor x = torch::randn({16, 32}).requires_grad_();
  CHECK_THROWS_WITH(shoestring::plan_sequential(layers.functions, x, 1, layers.kinds),
                    Catch::Matchers::Contains("budget"));
  CHECK_THROWS_WITH(shoestring::plan_sequential(layers.functions, x, 1, {0}),
                    Catch::Matchers::Contains("plan_sequential: kinds"));
  CHECK_THROWS_WITH(shoestring::checkpoint_sequential(layers.functions, shoestring::SequencePlan{}, x),
                    Catch::Matchers::Contains(
                        "checkpoint_sequential: plan: expected a plan for 7 functions, received one for 0"));
}

TEST_CASE("layers in tiles of tokens and of features", "[checkpoint]") {
  torch::nn::Linear up(16, 48), down(48, 16);
  const Tensor x = torch::randn({2, 7, 16}).requires_grad_();
  const std::vector<Tensor> leaves{x, up->weight, up->bias, down->weight, down->bias};
  const auto mlp = [=](const Tensor& x) mutable { return down(at::gelu(up(x))); };
  const auto same = [&](const Tensor& y, const Tensor& expected, const std::vector<Tensor>& of) {
    CHECK(at::allclose(y, expected, 1e-5, 1e-5));
    const auto ours = torch::autograd::grad({y.square().sum()}, of),
               plain = torch::autograd::grad({expected.square().sum()}, of);
    for (size_t i = 0; i < of.size(); ++i) CHECK(at::allclose(ours[i], plain[i], 1e-5, 1e-5));
  };
  for (const int64_t tiles : {1, 3, 7}) same(shoestring::tiled(mlp, x, tiles), down(at::gelu(up(x))), leaves);
  const auto by_features = [](const Tensor& x, const std::vector<Tensor>& w) {
    return at::linear(at::gelu(at::linear(x, w[0])), w[1]);
  };
  same(shoestring::tiled_features(by_features, x, {{up->weight, 0}, {down->weight, 1}}, 5),
       by_features(x, {up->weight, down->weight}), {x, up->weight, down->weight});
  CHECK_THROWS_WITH(shoestring::tiled(mlp, x, 8), Catch::Matchers::Contains("tiled: tiles: expected 1 to"));
  CHECK_THROWS_WITH(shoestring::tiled_features(by_features, x, {{up->weight, 0}, {down->weight, 0}}, 2),
                    Catch::Matchers::Contains("expected weights of the same size"));
}
