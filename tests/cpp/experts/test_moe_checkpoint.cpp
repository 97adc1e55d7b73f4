// Tests experts under checkpoint(): the second run chooses the experts of the first, and counts nothing.
#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/checkpoint/autograd.h>
#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/nn.h>

using at::Tensor;
using shoestring::checkpoint;
using shoestring::CheckpointOptions;
using shoestring::is_recomputing;
namespace nn = shoestring::nn;

namespace {

// The autograd engine must be installed before the first backward pass of any test, so before main().
[[maybe_unused]] const bool engine_for_experts = (shoestring::install_autograd_engine(), true);

// A layer whose logits change their order in the second run.
struct Unstable {
  Tensor router = torch::randn({8, 6}), noise = 5 * torch::randn({8});
  std::vector<Tensor> chosen, order, weights;

  Tensor operator()(const Tensor& x) {
    Tensor logits = at::linear(x, router);
    if (is_recomputing()) logits = logits + noise;
    auto route = shoestring::moe_route(logits, 2);
    chosen.push_back(route.index.clone());
    weights.push_back(route.weight.detach().clone());
    order.push_back(shoestring::moe_sort(route.index, 8).order.clone());
    route.weight.mul_(2);  // the checkpoint keeps a copy
    return (x * route.weight.sum(-1, true)).sin();
  }

  void check(size_t runs) const {
    REQUIRE(chosen.size() == runs);
    for (size_t i = 1; i < runs; ++i) {
      CHECK(at::equal(chosen[i], chosen[0]));
      CHECK(at::equal(weights[i], weights[0]));
      CHECK(at::equal(order[i], order[0]));
    }
  }
};

}  // namespace

TEST_CASE("The second run of a checkpoint chooses the experts of the first", "[moe][checkpoint]") {
  const Tensor x = torch::randn({20, 6}).set_requires_grad(true);
  const auto layer = std::make_shared<Unstable>();
  const auto run = [layer](const Tensor& y) { return (*layer)(y); };
  SECTION("with and without other kept results") {
    CHECK_FALSE(is_recomputing());
    for (const auto& keep : {std::vector<std::string>{}, {"products"}, {"shoestring::moe_sort"}}) {
      layer->chosen.clear(), layer->weights.clear(), layer->order.clear();
      checkpoint(run, x, CheckpointOptions().keep(keep)).sum().backward();
      layer->check(2);
    }
    CHECK_FALSE(is_recomputing());
  }
  SECTION("in each of several passes over a graph") {
    const Tensor loss = checkpoint(run, x).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    layer->check(3);
  }
  SECTION("in nested checkpoints") {
    const auto nested = [run](const Tensor& y) { return checkpoint(run, y.cos()).exp(); };
    checkpoint(nested, x).sum().backward();
    layer->check(3);
  }
  SECTION("two times in one function, apart") {
    const auto other = std::make_shared<Unstable>();
    const auto both = [run, other](const Tensor& y) { return (*other)(run(y) + 1); };
    checkpoint(both, x).sum().backward();
    layer->check(2);
    other->check(2);
  }
  SECTION("after a function that failed") {
    const auto fails = [run](const Tensor& y) -> Tensor {
      run(y);
      throw std::runtime_error("no");
    };
    CHECK_THROWS(checkpoint(fails, x));
    layer->chosen.clear(), layer->weights.clear(), layer->order.clear();
    checkpoint(run, x).sum().backward();
    layer->check(2);
  }
}

TEST_CASE("MoE under a checkpoint has its gradients, and counts a batch once", "[moe][checkpoint]") {
  // Without a shared MLP, backward of the experts is the first to need the second run.
  nn::MoE moe(nn::MoEOptions(6, 5, 4, 2).bias_rate(0.1).shared_hidden(GENERATE(0, 3)));
  const Tensor x = torch::randn({12, 6}).set_requires_grad(true);
  std::vector<Tensor> leaves = moe->parameters();
  leaves.push_back(x);
  Tensor losses;
  // A lambda, whose buffers the checkpoint does not know.
  const auto run = [&](const Tensor& y) {
    const auto [out, route] = moe(y);
    if (!is_recomputing()) losses = route.balance + route.z;  // has a gradient outside the checkpoint
    return out;
  };
  const auto plain = torch::autograd::grad({run(x).sum() + losses}, leaves);
  const Tensor counts = moe->router->counts.clone();
  CHECK(counts.sum().item<int64_t>() == 24);
  moe->router->counts.zero_();
  const Tensor out = checkpoint(run, x).sum();
  const auto checkpointed = torch::autograd::grad({out + losses}, leaves);
  for (size_t i = 0; i < leaves.size(); ++i) CHECK(at::equal(checkpointed[i], plain[i]));
  CHECK(at::equal(moe->router->counts, counts));
}
