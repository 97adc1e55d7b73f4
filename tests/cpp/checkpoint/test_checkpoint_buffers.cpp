// Tests that the second run of a checkpointed function leaves the buffers of modules as they are before it.
#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/checkpoint/checkpoint_sequence.h>

#include "emulated.h"

using at::Tensor;
using shoestring::checkpoint;
using shoestring::CheckpointOptions;

namespace {

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    at::manual_seed(3);
    in = register_module("in", torch::nn::Linear(8, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    out = register_module("out", torch::nn::Linear(8, 8));
  }
  Tensor forward(const Tensor& x) { return out(norm(in(x)).tanh()); }
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normed);

using Loss = std::function<Tensor(Normed&, const Tensor&)>;

// Returns the gradients of some steps, and then the buffers.
std::vector<Tensor> trained(const Loss& loss) {
  Normed module;
  std::vector<Tensor> all;
  for (int step = 0; step < 3; ++step) {
    const Tensor x = torch::randn({9, 8}).requires_grad_();
    auto of = module->parameters();
    of.push_back(x);
    for (Tensor& grad : torch::autograd::grad({loss(module, x).sum()}, of)) all.push_back(std::move(grad));
  }
  for (const Tensor& buffer : module->buffers()) all.push_back(buffer);
  return all;
}

void check_against_plain(const Loss& loss) {
  const auto expected = trained([](Normed& module, const Tensor& x) { return module->forward(x); });
  const auto received = trained(loss);
  REQUIRE(received.size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    INFO("tensor " << i);
    CHECK(at::equal(received[i], expected[i]));
  }
}

}  // namespace

TEST_CASE("checkpoint: a batch norm counts each batch once", "[checkpoint]") {
  for (const bool early_stop : {true, false}) {
    CAPTURE(early_stop);
    const auto options = CheckpointOptions().early_stop(early_stop);
    check_against_plain([&](Normed& module, const Tensor& x) { return checkpoint(module, x, options); });
    check_against_plain([&](Normed& module, const Tensor& x) {
      auto with = options;
      with.buffers(module->buffers());
      return checkpoint([module](const Tensor& t) mutable { return module->forward(t); }, x, with);
    });
  }
  check_against_plain([](Normed& module, const Tensor& x) {
    const auto options = CheckpointOptions().buffers(module->buffers());
    const auto inner = [=](const Tensor& t) mutable {
      return checkpoint([=](const Tensor& u) mutable { return module->forward(u); }, t, options);
    };
    return checkpoint(inner, x, CheckpointOptions().keep({"products"}));
  });
}

TEST_CASE("checkpoint: buffers that change in other ways", "[checkpoint]") {
  Tensor running = torch::zeros({4}), moved = torch::zeros({4}), grown = torch::zeros({4});
  const Tensor wide = torch::zeros({1}).expand({4});
  const auto run = [&](const Tensor& x) {
    running.narrow(0, 1, 2).add_(1);
    moved.set_data(moved + 1);
    grown.resize_({grown.size(0) + 100}).fill_(1);
    wide.narrow(0, 0, 1).add_(1);
    return (x * x).exp();
  };
  const Tensor x = torch::randn({5}).requires_grad_();
  const auto options = CheckpointOptions().buffers({running, moved, grown, wide});
  const Tensor y = checkpoint(run, x, options).sum();
  const auto before = [&] {
    return std::vector<Tensor>{running.clone(), moved.clone(), grown.clone(), wide.clone()};
  };
  const auto expected = before();
  CHECK(running.sum().item<float>() == 2);
  const auto version = running._version();
  y.backward();
  const auto received = before();
  for (size_t i = 0; i < expected.size(); ++i) {
    INFO("buffer " << i);
    CHECK(at::equal(received[i], expected[i]));
  }
  CHECK(running._version() ==
        version + 1);  // the second run counts as a change, and putting it back does not
  run(x);
  CHECK(running.sum().item<float>() == 4);
  CHECK(grown.size(0) == 204);
}

TEST_CASE("checkpoint: a second run that throws leaves the buffers", "[checkpoint]") {
  const Tensor running = torch::zeros({4});
  int runs = 0;
  const auto run = [&](const Tensor& x) {
    running.add_(1);
    const Tensor y = x.exp();
    if (++runs == 2) throw std::runtime_error("out of luck");
    return y.sin();
  };
  const Tensor y =
      checkpoint(run, torch::randn({4}).requires_grad_(), CheckpointOptions().buffers({running})).sum();
  CHECK_THROWS_WITH(y.backward(), Catch::Contains("out of luck"));
  CHECK(at::equal(running, torch::ones({4})));
}

TEST_CASE("plan_sequential and checkpoint_sequential leave the buffers", "[checkpoint]") {
  if (is_emulated()) return;  // the measurements would take minutes
  check_against_plain([&](Normed& module, const Tensor& x) {
    const std::vector<shoestring::BlockFunction> functions{
        [module](const Tensor& t) mutable { return module->forward(t); }};
    const auto buffers = module->buffers();
    auto plan = shoestring::plan_sequential(functions, x, int64_t{1} << 40, {}, nullptr, buffers);
    plan.names = {"recompute"};
    return shoestring::checkpoint_sequential(functions, plan, x, nullptr, buffers);
  });
}
