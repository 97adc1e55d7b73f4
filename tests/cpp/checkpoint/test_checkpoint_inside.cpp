// Tests checkpoints whose function itself runs a backward pass, or contains other checkpoints. Gradients must
// equal those without checkpoints bit for bit.
#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/checkpoint/checkpoint.h>

using at::Tensor;
using shoestring::checkpoint;
using shoestring::CheckpointOptions;

namespace {

using Function = std::function<Tensor(const Tensor&)>;
enum class How { kPlain, kCreate, kRetain };

Tensor inner_gradient(const Tensor& y, const Tensor& x, How how) {
  if (how == How::kRetain) {
    torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true);
    return torch::autograd::grad({y.cos().sum()}, {x}, {}, /*retain_graph=*/true)[0];
  }
  return torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true,
                               /*create_graph=*/how == How::kCreate)[0];
}

// Returns a function that runs a backward pass inside, and calls a function of depth - 1 that is built in the
// same way. `wrap` is applied to the function of each depth, for example to put it into a checkpoint.
Function levels(size_t depth, const std::vector<Tensor>& weights, How how,
                const std::function<Function(Function)>& wrap) {
  const Tensor w = weights[depth - 1];
  Function inner = depth > 1 ? levels(depth - 1, weights, how, wrap) : Function();
  return wrap([=](const Tensor& x) {
    Tensor y = at::dropout(at::mm(x, w), 0.2, /*train=*/true).tanh();
    if (inner) y = inner(y) + y.sin();
    const Tensor g = inner_gradient(at::mm(y, w).exp(), x, how);
    return at::mm(g, w).sigmoid() * y.cos() + at::mm(x, w) * g;
  });
}

std::vector<Tensor> all_gradients(const Function& fn, const Tensor& x, std::vector<Tensor> of) {
  of.push_back(x);
  at::manual_seed(7);
  const Tensor loss = (fn(x) * x).sum();
  auto all = torch::autograd::grad({loss}, of, {}, /*retain_graph=*/true);
  for (const Tensor& again : torch::autograd::grad({loss}, of)) all.push_back(again);
  at::manual_seed(7);
  const Tensor first = torch::autograd::grad({fn(x).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
  for (const Tensor& second : torch::autograd::grad({first.pow(2).sum()}, of)) all.push_back(second);
  // random numbers show whether the generator is in the same state as without checkpoints
  all.push_back(torch::randn({3}));
  return all;
}

}  // namespace

TEST_CASE("checkpoint: backward passes inside the function, nested", "[checkpoint]") {
  const size_t depth = GENERATE(1, 2, 3);
  const How how = GENERATE(How::kPlain, How::kCreate, How::kRetain);
  const bool early_stop = GENERATE(true, false);
  at::manual_seed(1234);
  std::vector<Tensor> weights;
  for (size_t i = 0; i < depth; ++i) weights.push_back((torch::randn({4, 4}) * 0.5).set_requires_grad(true));
  const Tensor x = torch::randn({4, 4}).requires_grad_();
  const auto expected =
      all_gradients(levels(depth, weights, how, [](Function fn) { return fn; }), x, weights);
  for (const std::vector<std::string>& keep :
       {std::vector<std::string>{}, {"aten::exp"}, {"products"}, {"aten::mm", "aten::native_dropout"}}) {
    const auto options = CheckpointOptions().early_stop(early_stop).keep(keep);
    const auto wrap = [options](Function fn) -> Function {
      return [=](const Tensor& t) { return checkpoint(fn, t, options); };
    };
    const auto received = all_gradients(levels(depth, weights, how, wrap), x, weights);
    REQUIRE(received.size() == expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      INFO("depth " << depth << " how " << static_cast<int>(how) << " early_stop " << early_stop << " keeps "
                    << keep.size() << " gradient " << i);
      CHECK(at::equal(received[i], expected[i]));
    }
  }
}

TEST_CASE("checkpoint with a backward pass inside notices another second run", "[checkpoint]") {
  const Tensor x = torch::randn({4, 4}).requires_grad_();
  auto runs = std::make_shared<int>(0);
  const auto differs = [runs](const Function& first, const Function& later) {
    *runs = 0;
    return [=](const Tensor& x) {
      const Tensor y = x.exp().sin();
      const Tensor g = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true)[0];
      // Run 1 of the function is the forward pass, and run 2 the recomputation for the backward pass inside
      // it. Later runs are recomputations for the outer backward pass.
      return (++*runs <= 2 ? first : later)(y * g);
    };
  };
  const Function more = [](const Tensor& t) { return t.exp().sin().cos(); },
                 less = [](const Tensor& t) { return t.exp(); };
  const auto backward = [&](const std::function<Tensor(const Tensor&)>& fn, bool early_stop) {
    checkpoint(fn, x, CheckpointOptions().early_stop(early_stop)).sum().backward();
  };
  CHECK_THROWS_WITH(backward(differs(less, more), false),
                    Catch::Matchers::Contains("do the same both times"));
  CHECK_THROWS_WITH(backward(differs(more, less), false),
                    Catch::Matchers::Contains("do the same both times"));
  CHECK_THROWS_WITH(backward(differs(less, [](const Tensor& t) { return t.narrow(0, 0, 2).exp(); }), false),
                    Catch::Matchers::Contains("do the same both times"));
  CHECK_NOTHROW(backward(differs(less, less), false));
}

TEST_CASE("checkpoint: a function that catches exceptions", "[checkpoint]") {
  const Tensor x = torch::randn({4}).requires_grad_();
  const auto run = [](const Tensor& x) {
    const Tensor y = x.exp();
    try {
      // sin() saves y; this is the last tensor that the checkpointed function saves for backward
      return y.sin();
    } catch (const std::exception&) {
      return y.cos().tanh();
    }
  };
  CHECK(at::equal(torch::autograd::grad({checkpoint(run, x).sum()}, {x})[0],
                  torch::autograd::grad({run(x).sum()}, {x})[0]));
}

namespace {

// An autograd function that saves its argument `weight` for backward but computes no gradient for it. `seen`
// records the tensors that backward unpacks.
struct Scaled : torch::autograd::Function<Scaled> {
  inline static std::vector<Tensor> seen;
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& weight) {
    ctx->save_for_backward({weight});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad) {
    seen.push_back(ctx->get_saved_variables()[0]);
    return {grad[0] * 2, Tensor()};
  }
};

}  // namespace

TEST_CASE("checkpoint: a frozen tensor that is saved comes back itself", "[checkpoint]") {
  const Tensor weight = torch::ones({4}), x = torch::randn({4}).requires_grad_();
  const auto run = [weight](const Tensor& x) {
    return Scaled::apply(Scaled::apply(x.sin(), weight), weight);
  };
  Scaled::seen.clear();
  checkpoint(run, x).sum().backward();
  checkpoint([&](const Tensor& x) { return checkpoint(run, x); }, x).sum().backward();
  CHECK(Scaled::seen.size() == 4);
  for (const Tensor& tensor : Scaled::seen) CHECK(tensor.is_same(weight));
  Scaled::seen.clear();
}
