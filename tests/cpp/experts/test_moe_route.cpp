#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/experts/ops.h>

#include "capabilities.h"

using at::Tensor;
using shoestring::moe_route;
using shoestring::moe_sort;
using shoestring::MoeRouteOptions;

TEST_CASE("moe_route passes its options", "[moe_route]") {
  const Tensor logits = torch::tensor({{6.f, -9.f, 3.f, 3.f, 2.f, 2.5f}, {0.f, 1.f, 2.f, 3.f, 4.f, 5.f}});
  for_each_capability([&](const char* capability) {
    CAPTURE(capability);
    const auto plain = moe_route(logits, 2);
    CHECK(at::equal(plain.index, torch::tensor({{0, 2}, {5, 4}})));
    CHECK(at::allclose(plain.weight, logits.softmax(-1).gather(-1, plain.index)));
    CHECK(at::equal(plain.counts, torch::tensor({1, 0, 1, 0, 1, 1})));

    const auto grouped = moe_route(logits, 2, MoeRouteOptions().score("topk_softmax").groups(3).scale(2));
    CHECK(at::equal(grouped.index, torch::tensor({{2, 3}, {5, 4}})));
    CHECK(at::allclose(grouped.weight[0], torch::tensor({1.f, 1.f})));

    const auto options = MoeRouteOptions()
                             .score("sigmoid")
                             .bias(torch::tensor({-1.f, 2.f, 0.f, 0.f, 0.f, 0.f}))
                             .renormalize(true)
                             .mask(torch::tensor({true, false}));
    const auto masked = moe_route(logits, 2, options);
    CHECK(at::equal(masked.index, torch::tensor({{1, 2}, {-1, -1}})));
    CHECK(at::allclose(masked.weight.sum(-1), torch::tensor({1.f, 0.f})));
    CHECK(masked.counts.sum().item<int64_t>() == 2);
  });
}

TEST_CASE("moe_route has gradients of its weights and losses", "[moe_route]") {
  const Tensor logits = torch::randn({20, 6}).set_requires_grad(true);
  const auto route = moe_route(logits, 2);
  CHECK_FALSE(route.index.requires_grad());
  CHECK_FALSE(route.counts.requires_grad());
  const Tensor loss = route.weight.square().sum() + route.balance + route.z;
  const Tensor shares = logits.softmax(-1), lse = logits.logsumexp(-1);
  const Tensor expected = shares.gather(-1, route.index).square().sum() +
                          (route.counts * shares.sum(0)).sum() * 6 / 400 + lse.square().mean();
  CHECK(at::allclose(loss, expected));
  const Tensor ours = torch::autograd::grad({loss}, {logits})[0];
  CHECK(at::allclose(ours, torch::autograd::grad({expected}, {logits})[0], 1e-4, 1e-6));
}

TEST_CASE("moe_route and moe_sort refuse arguments that do not fit", "[moe_route]") {
  const Tensor logits = torch::randn({3, 4});
  CHECK_THROWS_WITH(moe_route(logits, 5),
                    Catch::Contains("moe_route: top_k: expected 1 to 4, the number of experts, received 5"));
  CHECK_THROWS_WITH(moe_route(logits, 1, MoeRouteOptions().score("max")),
                    Catch::Contains("moe_route: score: expected 'softmax', 'sigmoid' or 'topk_softmax'"));
  CHECK_THROWS_WITH(moe_sort(torch::zeros({2}), 3),
                    Catch::Contains("moe_sort: index: expected int64, received Float"));
}

TEST_CASE("moe_sort keeps the order of the slots of an expert", "[moe_sort]") {
  const auto sorted = moe_sort(torch::tensor({{2, 0}, {-1, 2}, {0, 2}}), 3);
  CHECK(at::equal(sorted.order, torch::tensor({1, 4, 0, 3, 5, 2})));
  CHECK(at::equal(sorted.inverse, torch::tensor({2, 0, 5, 3, 1, 4})));
  CHECK(at::equal(sorted.offsets, torch::tensor({0, 2, 2, 5})));
}
