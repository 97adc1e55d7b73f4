// Tests checkpoint(): every gradient must equal the gradient of the same function without a checkpoint, bit
// for bit.
#include "catch.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/library.h>
#include <torch/nn/modules/linear.h>

#include <shoestring/checkpoint/autograd.h>
#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/ops.h>

using at::Tensor;
using shoestring::checkpoint;
using shoestring::CheckpointOptions;

namespace {

// The autograd engine for checkpoints must be installed before the first backward pass of any test, so before
// main().
[[maybe_unused]] const bool engine_installed = (shoestring::install_autograd_engine(), true);

struct Block {
  torch::nn::Linear up{8, 32}, down{32, 8};
  int runs = 0;

  Tensor operator()(const Tensor& x) {
    ++runs;
    return x + down(at::dropout(at::gelu(up(x)), 0.3, /*train=*/true)) * x.sigmoid();
  }
  std::vector<Tensor> parameters() const { return {up->weight, up->bias, down->weight, down->bias}; }
};

std::vector<Tensor> gradients(const std::function<Tensor()>& loss, const std::vector<Tensor>& of) {
  torch::manual_seed(7);
  return torch::autograd::grad({loss()}, of);
}

void check_same(const std::vector<Tensor>& received, const std::vector<Tensor>& expected) {
  REQUIRE(received.size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    INFO("gradient " << i);
    CHECK(at::equal(received[i], expected[i]));
  }
}

template <class... T>
std::vector<Tensor> all(const Block& block, T... more) {
  auto list = block.parameters();
  (list.push_back(more), ...);
  return list;
}

}  // namespace

TEST_CASE("checkpoint gives the gradients of the function, bit for bit, dropout included", "[checkpoint]") {
  auto block = std::make_shared<Block>();
  const Tensor x = torch::randn({5, 8}).requires_grad_();
  const bool early_stop = GENERATE(true, false);
  const auto options = CheckpointOptions().early_stop(early_stop);
  const auto run = [block](const Tensor& x) { return (*block)(x); };
  const auto expected = gradients([&] { return run(x).pow(2).sum(); }, all(*block, x));
  const auto received = gradients([&] { return checkpoint(run, x, options).pow(2).sum(); }, all(*block, x));
  check_same(received, expected);
  CHECK(block->runs == 3);
  // After a checkpoint, the random number generator continues as it does without checkpoint.
  torch::manual_seed(7);
  run(x);
  const Tensor next = torch::randn({3});
  torch::manual_seed(7);
  checkpoint(run, x, options).sum().backward();
  CHECK(at::equal(next, torch::randn({3})));
}

TEST_CASE("checkpoint keeps nothing of the function's inside", "[checkpoint]") {
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  // weak references to the result of exp() in each run; sin() saves this tensor for backward
  std::vector<Weak> saved;
  const auto run = [&](const Tensor& x) {
    const Tensor y = x.exp();
    saved.push_back(y.storage().getWeakStorageImpl());
    return y.sin();
  };
  const Tensor x = torch::randn({3}).requires_grad_();
  const Tensor plain = run(x), y = checkpoint(run, x);
  CHECK(!saved[0].expired());
  CHECK(saved[1].expired());
  y.sum().backward();
  REQUIRE(saved.size() == 3);
  CHECK(saved[2].expired());
  checkpoint(run, x, CheckpointOptions().early_stop(false)).sum().backward();
  CHECK(saved[3].expired());
  CHECK(saved[4].expired());
  // The autograd graph owns the checkpointed function and what it captures, and frees both when it is freed.
  auto alive = std::make_shared<int>(0);
  Tensor z = checkpoint([alive](const Tensor& x) { return x.exp(); }, x);
  CHECK(alive.use_count() > 1);
  z.sum().backward();
  CHECK(alive.use_count() == 1);
  z = checkpoint([alive](const Tensor& x) { return x.exp(); }, x);
  z.reset();
  CHECK(alive.use_count() == 1);
}

TEST_CASE("checkpoint takes tuples, lists, optionals and values, and returns anything", "[checkpoint]") {
  const Tensor a = torch::randn({4}).requires_grad_(), b = torch::randn({4}),
               c = torch::randn({4}).requires_grad_();
  struct Result {
    Tensor sum;
    int64_t count;
  };
  const auto run = [](const Tensor& a, const std::vector<Tensor>& list, const std::optional<Tensor>& maybe,
                      double factor, const Tensor& none) {
    REQUIRE(!none.defined());
    Tensor sum = a.sin();
    for (const Tensor& t : list) sum = sum + t.exp();
    return Result{(maybe ? sum * maybe->cos() : sum) * factor, static_cast<int64_t>(list.size())};
  };
  const std::tuple inputs(a, std::vector<Tensor>{b, c}, std::optional<Tensor>(c), 0.5, Tensor());
  const Result result = checkpoint(run, inputs);
  CHECK(result.count == 2);
  const auto expected = gradients([&] { return std::apply(run, inputs).sum.sum(); }, {a, c});
  check_same(torch::autograd::grad({result.sum.sum()}, {a, c}), expected);
  // The checkpointed function takes a list as its only input, and returns several outputs, one of an integer
  // dtype.
  const auto several = [](const std::vector<Tensor>& list) {
    return std::tuple(list[0].exp() * list[1], list[1].argmax(), list[0].view({2, 2}));
  };
  const auto [product, index, view] = checkpoint(several, std::vector<Tensor>{a, c});
  CHECK(index.scalar_type() == at::kLong);
  const auto [product_, index_, view_] = several({a, c});
  check_same(torch::autograd::grad({product.sum() + view.pow(3).sum()}, {a, c}),
             torch::autograd::grad({product_.sum() + view_.pow(3).sum()}, {a, c}));
}

TEST_CASE("checkpoint nests, and inputs that need no gradient work", "[checkpoint]") {
  auto block = std::make_shared<Block>();
  // the input x requires no gradient; only the weights of the checkpointed function do
  const Tensor x = torch::randn({5, 8});
  const auto inner = [block](const Tensor& x) { return (*block)(x).tanh(); };
  const auto plain = [inner](const Tensor& x) { return inner(inner(x).exp()).sin(); };
  const auto nested = [inner](const Tensor& x) {
    return checkpoint(inner, checkpoint(inner, x).exp()).sin();
  };
  const auto expected = gradients([&] { return plain(x).sum(); }, block->parameters());
  check_same(gradients([&] { return checkpoint(nested, x).sum(); }, block->parameters()), expected);
  check_same(
      gradients([&] { return checkpoint([&](const Tensor& x) { return checkpoint(nested, x); }, x).sum(); },
                block->parameters()),
      expected);
}

TEST_CASE("checkpoint: retain_graph, two uses, second derivatives, tied and captured tensors",
          "[checkpoint]") {
  const Tensor w = torch::randn({6}).requires_grad_(), x = torch::randn({6}).requires_grad_();
  const Tensor captured = w.exp();  // a tensor that the checkpointed function captures and that is not a leaf
  const auto run = [captured, w](const Tensor& x) { return (captured * x).sin() * w * x; };
  const Tensor y = checkpoint(run, x), plain = run(x);
  const auto once = torch::autograd::grad({y.sum()}, {x, w}, {}, /*retain_graph=*/true);
  check_same(torch::autograd::grad({y.sum()}, {x, w}, {}, /*retain_graph=*/true), once);
  check_same(once, torch::autograd::grad({plain.sum()}, {x, w}, {}, true));
  // Compare gradients with respect to x alone, and then second derivatives (create_graph).
  check_same(torch::autograd::grad({y.sum()}, {x}, {}, true),
             torch::autograd::grad({plain.sum()}, {x}, {}, true));
  const auto first = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true);
  const auto expected = torch::autograd::grad({plain.sum()}, {x}, {}, true, true);
  check_same(torch::autograd::grad({first[0].pow(2).sum()}, {x, w}, {}, true),
             torch::autograd::grad({expected[0].pow(2).sum()}, {x, w}, {}, true));
  // The function is checkpointed three times in one graph; the output of one checkpoint is the input of
  // another.
  const auto twice = [&](auto f) { return torch::autograd::grad({(f(x) * f(f(x) + x)).sum()}, {x, w}); };
  check_same(
      twice([&](const Tensor& t) { return checkpoint([w](const Tensor& t) { return t.sin() * w; }, t); }),
      twice([&](const Tensor& t) { return t.sin() * w; }));
  y.sum().backward();
  CHECK_THROWS_WITH(y.sum().backward(), Catch::Matchers::Contains("second time"));
}

TEST_CASE("checkpoint: views and operators in place inside", "[checkpoint]") {
  const Tensor x = torch::randn({4, 6}).requires_grad_();
  const auto run = [](const Tensor& x) {
    Tensor y = x.view({6, 4}).t() * 2;
    y.select(0, 1).mul_(3);
    return y.sin().relu_().narrow(1, 2, 3).exp();
  };
  check_same(gradients([&] { return checkpoint(run, x).pow(2).sum(); }, {x}),
             gradients([&] { return run(x).pow(2).sum(); }, {x}));
  // If the checkpointed function modifies its input in place, backward raises an error instead of computing
  // wrong gradients.
  const auto changed = [](const Tensor& x) { return x.mul_(2).sin(); };
  const Tensor input = x * 1;
  CHECK_THROWS_WITH(checkpoint(changed, input).sum().backward(), Catch::Matchers::Contains("inplace"));
}

TEST_CASE("checkpoint restores autocast", "[checkpoint]") {
  auto block = std::make_shared<Block>();
  const Tensor x = torch::randn({5, 8}).requires_grad_();
  const auto run = [block](const Tensor& x) { return (*block)(x).to(at::kFloat); };
  const auto under_autocast = [&](bool checkpointed) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
    const Tensor loss = (checkpointed ? checkpoint(run, checkpoint(run, x)) : run(run(x))).sum();
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return loss;
  };
  check_same(gradients([&] { return under_autocast(true); }, all(*block, x)),
             gradients([&] { return under_autocast(false); }, all(*block, x)));
  CHECK(!at::autocast::is_autocast_enabled(at::kCPU));
}

TEST_CASE("checkpoint: exceptions leave everything as it was", "[checkpoint]") {
  const Tensor x = torch::randn({4}).requires_grad_();
  auto fail = std::make_shared<bool>(true);
  const auto run = [fail](const Tensor& x) {
    const Tensor y = x.exp();
    if (*fail) throw std::runtime_error("out of luck");
    return y.sin();
  };
  CHECK_THROWS_WITH(checkpoint(run, x), "out of luck");
  // The checkpoint's saved-tensor hooks are removed after the exception, so autograd saves tensors as usual.
  CHECK(x.exp().grad_fn());
  *fail = false;
  const Tensor y = checkpoint(run, x);
  *fail = true;
  torch::manual_seed(3);
  const Tensor expected = torch::randn({2});
  torch::manual_seed(3);
  CHECK_THROWS_WITH(y.sum().backward({}, /*retain_graph=*/true), "out of luck");
  CHECK(at::equal(expected, torch::randn({2})));
  *fail = false;
  y.sum().backward();
  CHECK(at::equal(x.grad(), gradients([&] { return run(x).sum(); }, {x})[0]));
}

TEST_CASE("checkpoint notices a function that does something else the second time", "[checkpoint]") {
  const Tensor x = torch::randn({4, 4}).requires_grad_();
  auto calls = std::make_shared<int>(0);
  const auto other_shape = [calls](const Tensor& x) {
    return ++*calls == 1 ? x.exp().sin() : x.narrow(0, 0, 2).exp().sin();
  };
  CHECK_THROWS_WITH(checkpoint(other_shape, x).sum().backward(),
                    Catch::Matchers::Contains("do the same both times"));
  *calls = 0;
  const auto less = [calls](const Tensor& x) { return ++*calls == 1 ? x.exp().sin() : x.exp(); };
  CHECK_THROWS_WITH(checkpoint(less, x).sum().backward(),
                    Catch::Matchers::Contains("do the same both times"));
}

TEST_CASE("checkpoint without gradients is a call", "[checkpoint]") {
  const at::NoGradGuard no_grad;
  int runs = 0;
  const Tensor y = checkpoint(
      [&](const Tensor& x) {
        ++runs;
        return x.exp();
      },
      torch::randn({3}).requires_grad_());
  CHECK(runs == 1);
  CHECK(!y.requires_grad());
}

TEST_CASE("early stop ends the second run at the last saved tensor", "[checkpoint]") {
  int ends = 0;
  const auto run = [&](const Tensor& x) {
    const Tensor y = x.exp().sin() + 1;
    ++ends;
    return y;
  };
  const Tensor x = torch::randn({3}).requires_grad_();
  checkpoint(run, x).sum().backward();
  CHECK(ends == 1);
  checkpoint(run, x, CheckpointOptions().early_stop(false)).sum().backward();
  CHECK(ends == 3);
}

TEST_CASE("checkpoint_sequential", "[checkpoint]") {
  std::vector<torch::nn::Linear> layers;
  std::vector<Tensor> parameters;
  for (int i = 0; i < 5; ++i) {
    layers.emplace_back(6, 6);
    parameters.push_back(layers.back()->weight);
  }
  const Tensor x = torch::randn({3, 6}).requires_grad_();
  const auto plain = [&] {
    Tensor y = x;
    for (auto& layer : layers) y = layer(y);
    return y.sum();
  };
  const auto expected = gradients(plain, parameters);
  for (const int64_t segments : {1, 2, 5}) {
    check_same(
        gradients([&] { return shoestring::checkpoint_sequential(layers, segments, x).sum(); }, parameters),
        expected);
  }
  CHECK_THROWS_WITH(shoestring::checkpoint_sequential(layers, 6, x),
                    Catch::Matchers::Contains("segments: expected 1 to"));
}

// ---- CheckpointOptions::keep: results of operators that a checkpoint keeps instead of recomputing

namespace {

int products = 0;  // number of calls of product_cpu

std::tuple<Tensor, Tensor> product_cpu(const Tensor& x, const Tensor& w) {
  ++products;
  return {at::mm(x, w), x.sum({1})};
}

struct Product : torch::autograd::Function<Product> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& w) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("checkpoint_test::product", "")
                               .typed<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&)>();
    const auto [y, sums] = op.call(x, w);
    ctx->save_for_backward({x, w, sums});
    return y * 1;  // multiplied by 1, so that later operators do not save the result of `product` itself
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grad) {
    const auto saved = ctx->get_saved_variables();
    return {at::mm(grad[0], saved[1].t()) + saved[2].unsqueeze(1), at::mm(saved[0].t(), grad[0])};
  }
};

}  // namespace

TORCH_LIBRARY(checkpoint_test, m) {
  m.def("product(Tensor x, Tensor w) -> (Tensor, Tensor)");
  m.impl("product", c10::DispatchKey::CPU, &product_cpu);
}

TEST_CASE("checkpoint computes what it keeps once", "[checkpoint]") {
  const Tensor x = torch::randn({4, 4}).requires_grad_(), w = torch::randn({4, 4}).requires_grad_();
  const auto run = [w](const Tensor& x) {
    const Tensor y = shoestring::tag_activation(Product::apply(x.exp(), w), "first");
    return Product::apply(y.sin(), w).exp();
  };
  const auto expected = gradients([&] { return run(x).sum(); }, {x, w});
  const auto computed = [&](const std::vector<std::string>& keep) {
    products = 0;
    const auto received =
        gradients([&] { return checkpoint(run, x, CheckpointOptions().keep(keep)).sum(); }, {x, w});
    check_same(received, expected);
    return products;
  };
  CHECK(computed({}) == 4);
  CHECK(computed({"checkpoint_test::product"}) == 2);
  CHECK(computed({"another"}) == 4);
  // Run backward twice through one graph. Then checkpoint a function that itself calls checkpoint().
  products = 0;
  const Tensor y = checkpoint(run, x, CheckpointOptions().keep({"checkpoint_test::product"}));
  check_same(torch::autograd::grad({y.sum()}, {x, w}, {}, /*retain_graph=*/true), expected);
  check_same(torch::autograd::grad({y.sum()}, {x, w}), expected);
  CHECK(products == 2);
  const auto inner = [&](const Tensor& x) { return checkpoint(run, x); };
  check_same(
      gradients(
          [&] { return checkpoint(inner, x, CheckpointOptions().keep({"checkpoint_test::product"})).sum(); },
          {x, w}),
      expected);
}

TEST_CASE("a tag keeps what made the activation, seen through views", "[checkpoint]") {
  const Tensor x = torch::randn({4, 4}).requires_grad_(), w = torch::randn({4, 4}).requires_grad_();
  using Op = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("checkpoint_test::product", "").typed<Op>();
  const auto run = [&](const Tensor& x) {
    Tensor made;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      made = std::get<0>(op.call(x, w));
    }
    shoestring::tag_activation(made.view({2, 8}).narrow(0, 1, 1), "made");
    return (made * x).exp() * x.sin();
  };
  const auto expected = gradients([&] { return run(x).sum(); }, {x});
  for (const bool kept : {true, false}) {
    products = 0;
    const auto options = CheckpointOptions().keep({kept ? "made" : "other"});
    check_same(gradients([&] { return checkpoint(run, x, options).sum(); }, {x}), expected);
    CHECK(products == (kept ? 1 : 2));
  }
  const auto changed = [&](const Tensor& x) {
    const Tensor y = x.exp().add_(1);
    return shoestring::tag_activation(y, "made").sin();
  };
  CHECK_THROWS_WITH(checkpoint(changed, x, CheckpointOptions().keep({"made"})),
                    Catch::Matchers::Contains("tag_activation: made"));
}

TEST_CASE("kept products, attention and random operators leave the gradients as they are", "[checkpoint]") {
  auto block = std::make_shared<Block>();
  const Tensor x = torch::randn({5, 8}).requires_grad_();
  const auto run = [block](const Tensor& x) {
    const Tensor y = (*block)(x).view({1, 5, 2, 4}).transpose(1, 2);
    return at::dropout(shoestring::attention(y, y, y), 0.5, true) + at::scaled_dot_product_attention(y, y, y);
  };
  const auto expected = gradients([&] { return run(x).pow(2).sum(); }, all(*block, x));
  for (const std::vector<std::string>& keep : {std::vector<std::string>{"products"},
                                               {"attention"},
                                               {"products", "attention", "aten::bernoulli"},
                                               {"aten::gelu", "aten::native_dropout"}}) {
    check_same(gradients([&] { return checkpoint(run, x, CheckpointOptions().keep(keep)).pow(2).sum(); },
                         all(*block, x)),
               expected);
  }
}

TEST_CASE("what cannot be kept is refused", "[checkpoint]") {
  const Tensor x = torch::randn({3}).requires_grad_();
  const auto with = [&](const char* keep, const std::function<Tensor(const Tensor&)>& run) {
    checkpoint(run, x, CheckpointOptions().keep({keep})).sum().backward();
  };
  CHECK_THROWS_WITH(with("aten::no_such", [](const Tensor& x) { return x.exp(); }),
                    Catch::Matchers::Contains("which is no operator"));
  CHECK_THROWS_WITH(with("aten::relu_", [](const Tensor& x) { return x.exp().relu_(); }),
                    Catch::Matchers::Contains("aten::relu_"));
  CHECK_THROWS_WITH(with("aten::cos", [](const Tensor& x) { return x.cos().mul_(2).exp(); }),
                    Catch::Matchers::Contains("modified in place"));
  auto runs = std::make_shared<int>(0);
  CHECK_THROWS_WITH(
      with("aten::sum", [=](const Tensor& x) { return x.narrow(0, 0, ++*runs).sum().exp() * x.sin(); }),
      Catch::Matchers::Contains("other sizes or dtypes"));
}
