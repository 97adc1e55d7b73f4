#include "catch.h"

#include <set>
#include <vector>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/layers/stochastic_depth.h>

using at::Tensor;
using shoestring::stochastic_depth;
using shoestring::StochasticDepthOptions;

namespace {

/// Returns the rows that stochastic_depth keeps of a tensor of `rows` rows.
std::vector<int64_t> depth_rows_kept(int64_t rows, const StochasticDepthOptions& options) {
  std::vector<int64_t> kept;
  const auto branch = [&](const Tensor& x) {
    for (int64_t i = 0; i < x.size(0); ++i) kept.push_back(x[i].item<int64_t>());
    return x;
  };
  stochastic_depth(branch, torch::arange(rows).to(at::kDouble), options);
  return kept;
}

}  // namespace

TEST_CASE("stochastic_depth keeps the rows that Python keeps", "[stochastic_depth]") {
  using Rows = std::vector<int64_t>;
  const auto at_step = [](int64_t step) { return StochasticDepthOptions(0.4, step, 3).seed(-5); };
  CHECK(depth_rows_kept(8, at_step(0)) == Rows{0, 1, 3, 6, 7});
  CHECK(depth_rows_kept(8, at_step(1)) == Rows{0, 1, 2, 3, 6});
  CHECK(depth_rows_kept(8, at_step(int64_t{1} << 40)) == Rows{1, 2, 3, 5, 7});
}

TEST_CASE("stochastic_depth adds the branch of the kept rows", "[stochastic_depth]") {
  const Tensor w = torch::randn({5, 5}, at::kDouble).requires_grad_();
  const Tensor x = torch::randn({7, 5}, at::kDouble).requires_grad_();
  const auto branch = [&](const Tensor& rows) { return rows.matmul(w).tanh(); };
  const auto options = StochasticDepthOptions(0.4, 3, 1);
  const Tensor y = stochastic_depth(branch, x, options);
  Tensor kept = torch::zeros({7, 1}, at::kDouble);
  for (const int64_t row : depth_rows_kept(7, options)) kept[row].fill_(1);
  const Tensor exact = x + kept * branch(x) / 0.6;
  CHECK(at::allclose(y, exact, 1e-12));
  const auto found = torch::autograd::grad({y.square().sum()}, {x, w});
  const auto expected = torch::autograd::grad({exact.square().sum()}, {x, w});
  CHECK(at::allclose(found[0], expected[0], 1e-12));
  CHECK(at::allclose(found[1], expected[1], 1e-12));
  CHECK(at::equal(stochastic_depth(branch, x, StochasticDepthOptions(0.4, 3, 1).training(false)),
                  x + branch(x)));
}

TEST_CASE("stochastic_depth skips whole branches, also under checkpoint", "[stochastic_depth]") {
  std::set<int> calls;
  const Tensor x = torch::randn({4, 3}).requires_grad_();
  for (int step = 0; step < 40; ++step) {
    int called = 0;
    const auto branch = [&](const Tensor& rows) {
      ++called;
      return rows.sin();
    };
    const auto options = StochasticDepthOptions(0.5, step, 0).mode("batch");
    const auto run = [&](const Tensor& t) { return stochastic_depth(branch, t, options).square(); };
    const Tensor plain = torch::autograd::grad({run(x).sum()}, {x})[0];
    calls.insert(called);
    CHECK(at::equal(torch::autograd::grad({shoestring::checkpoint(run, x).sum()}, {x})[0], plain));
  }
  CHECK(calls == std::set<int>{0, 1});
}

TEST_CASE("stochastic_depth keeps the memory format", "[stochastic_depth]") {
  const Tensor x = torch::randn({8, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto branch = [](const Tensor& rows) {
    CHECK(rows.is_contiguous(at::MemoryFormat::ChannelsLast));
    return rows.exp();
  };
  const Tensor y = stochastic_depth(branch, x, StochasticDepthOptions(0.5, 0, 0));
  CHECK(y.is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST_CASE("stochastic_depth_rate grows linearly with depth", "[stochastic_depth]") {
  CHECK(shoestring::stochastic_depth_rate(3, 4, 0.4) == 0.4);
  CHECK(shoestring::stochastic_depth_rate(0, 4, 0.4) == 0.1);
  CHECK_THROWS_AS(shoestring::stochastic_depth_rate(4, 4, 0.4), c10::ValueError);
}

TEST_CASE("stochastic_depth refuses what does not fit", "[stochastic_depth]") {
  const Tensor x = torch::randn({4, 2});
  const auto same = [](const Tensor& rows) { return rows; };
  CHECK_THROWS_AS(stochastic_depth(same, x, {1, 0, 0}), c10::ValueError);
  CHECK_THROWS_AS(stochastic_depth(same, x, {0.5, -1, 0}), c10::ValueError);
  CHECK_THROWS_AS(stochastic_depth(same, x, StochasticDepthOptions(0.5, 0, 0).mode("rows")), c10::ValueError);
  CHECK_THROWS_AS(stochastic_depth([](const Tensor& rows) { return rows.sum(0); }, x, {0.5, 0, 0}),
                  c10::ValueError);
}
