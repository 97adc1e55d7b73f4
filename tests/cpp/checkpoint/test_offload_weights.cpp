// Tests OffloadWeights: training with weights in a file gives the same bits as training with weights in
// memory.
#include "catch.h"

#include <torch/nn/modules/linear.h>

#include <ATen/ATen.h>

#include "emulated.h"
#include "folder.h"

#include <shoestring/checkpoint/offload_weights.h>
#include <shoestring/ops.h>
#include <shoestring/optim.h>

using at::Tensor;
using Catch::Contains;
using shoestring::OffloadWeights;
using shoestring::OffloadWeightsOptions;
using shoestring::optim::AdamW;
using shoestring::optim::AdamWOptions;

namespace {

struct WeightedModel {
  explicit WeightedModel(int depth = 5) {
    at::manual_seed(3);
    first = torch::nn::Linear(24, 24);
    for (int i = 0; i < depth; ++i) blocks.emplace_back(torch::nn::Linear(24, 24));
  }
  Tensor operator()(const Tensor& batch, OffloadWeights* offload = nullptr) {
    Tensor x = first->forward(batch);
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto forward = [&](const Tensor& y) { return y + at::gelu(blocks[i]->forward(y)); };
      x = offload == nullptr ? forward(x) : offload->run(static_cast<int64_t>(i), x, forward);
    }
    return x.pow(2).mean();
  }
  std::vector<Tensor> parameters() const {
    std::vector<Tensor> all = first->parameters();
    for (const auto& block : blocks) {
      for (const Tensor& p : block->parameters()) all.push_back(p);
    }
    return all;
  }
  void freeze() {
    for (auto& block : blocks) {
      for (Tensor& p : block->parameters()) p.requires_grad_(false);
    }
  }
  torch::nn::Linear first{nullptr};
  std::vector<torch::nn::Linear> blocks;
};

std::vector<Tensor> train_weights(WeightedModel& model, OffloadWeights* offload, bool in_backward) {
  std::vector<Tensor> trained;
  for (const Tensor& p : model.parameters()) {
    if (p.requires_grad()) trained.push_back(p);
  }
  AdamW optimizer(trained, AdamWOptions(1e-2));
  optimizer.set_step_in_backward(in_backward);
  std::vector<Tensor> losses;
  at::manual_seed(5);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const Tensor loss = model(at::randn({8, 24}), offload);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.detach());
  }
  return losses;
}

bool same_weights(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](auto& x, auto& y) { return x.equal(y); });
}

}  // namespace

TEST_CASE("weights in a file train to the same bits", "[offload_weights]") {
  const bool full = GENERATE(false, true);
  const auto folder = Folder();
  WeightedModel plain, model;
  if (!full) plain.freeze(), model.freeze();
  const auto expected = train_weights(plain, nullptr, full);
  OffloadWeights offload(OffloadWeightsOptions().folder(folder.path));
  for (const auto& block : model.blocks) {
    full ? offload.add({}, block->parameters()) : offload.add(block->parameters());
  }
  CHECK(same_weights(train_weights(model, &offload, full), expected));
  const auto figures = offload.statistics();
  CHECK(figures.at("away") == 5 * 4096);
  CHECK((figures.at("written") > 0) == full);
  // forward and backward fetch all blocks but two, and the first forward fetches all
  CHECK(figures.at("fetched") >= (2 + 3 * 2 * 3) * 4096);
  offload.restore();
  CHECK(same_weights(model.parameters(), plain.parameters()));
}

TEST_CASE("weights that are away are present on demand", "[offload_weights]") {
  const auto folder = Folder();
  WeightedModel model(3);
  model.freeze();
  const Tensor before = model.blocks[1]->weight.clone();
  OffloadWeights offload(OffloadWeightsOptions().folder(folder.path));
  for (const auto& block : model.blocks) offload.add(block->parameters());
  CHECK_THROWS_WITH(model.blocks[1]->weight.sum(),
                    Contains("offload_weights: block 1: expected weights on cpu"));
  offload.present(1, [&] { model.blocks[1]->weight.mul_(2); });
  CHECK_THROWS_WITH(offload.present(3, [] {}), Contains("block: expected one of 3 blocks, received 3"));
  CHECK_THROWS_AS(offload.present(1, [] { throw std::runtime_error("mine"); }), std::runtime_error);
  offload.restore();
  CHECK(model.blocks[1]->weight.equal(before * 2));
}

TEST_CASE("a fetched block may throw", "[offload_weights]") {
  const auto folder = Folder();
  WeightedModel model(3);
  model.freeze();
  const at::NoGradGuard no_grad;
  const Tensor batch = at::randn({2, 24}), expected = model(batch);
  OffloadWeights offload(OffloadWeightsOptions().folder(folder.path).keep(4096));
  for (const auto& block : model.blocks) offload.add(block->parameters());
  CHECK(offload.statistics().at("away") == 2 * 4096);
  const auto fail = [](const Tensor&) -> Tensor { throw std::runtime_error("mine"); };
  CHECK_THROWS_AS(offload.run(2, batch, fail), std::runtime_error);
  CHECK(model(batch, &offload).equal(expected));
}

TEST_CASE("weights that are unfrozen later are trained or refused", "[offload_weights]") {
  const auto folder = Folder();
  WeightedModel plain, model;
  const auto unfreeze = [](WeightedModel& m, bool requires_grad) {
    for (Tensor& p : m.blocks[2]->parameters()) p.requires_grad_(requires_grad);
  };
  unfreeze(plain, false), unfreeze(model, false);
  OffloadWeights offload(OffloadWeightsOptions().folder(folder.path));
  for (size_t i = 0; i < model.blocks.size(); ++i) {
    const auto weights = model.blocks[i]->parameters();
    i == 2 ? offload.add(weights) : offload.add({}, weights);
  }
  unfreeze(plain, true), unfreeze(model, true);
  const auto expected = train_weights(plain, nullptr, true);
  CHECK(same_weights(train_weights(model, &offload, true), expected));
  offload.restore();
  CHECK(same_weights(model.parameters(), plain.parameters()));

  WeightedModel frozen(3);
  frozen.freeze();
  OffloadWeights other(OffloadWeightsOptions().folder(folder.path));
  for (const auto& block : frozen.blocks) other.add(block->parameters());
  for (Tensor& p : frozen.blocks[1]->parameters()) p.requires_grad_(true);
  CHECK_THROWS_WITH(frozen(at::randn({2, 24}), &other),
                    Contains("block 1: expected frozen weights, as when they left, received one of shape"));
  const Tensor table = at::randn({700, 64});
  other.add_table(table);
  table.requires_grad_(true);
  CHECK_THROWS_WITH(other.embedding(table, at::ones({2}, at::kLong)),
                    Contains("table: expected a frozen weight, as when it left"));
}

TEST_CASE("a write outside of the uses of a block is an error, and one in forward is kept",
          "[offload_weights]") {
  const auto folder = Folder();
  WeightedModel model(3);
  model.freeze();
  const at::NoGradGuard no_grad;
  const Tensor before = model.blocks[1]->weight.clone();
  OffloadWeights offload(OffloadWeightsOptions().folder(folder.path));
  for (const auto& block : model.blocks) offload.add(block->parameters());
  model(at::randn({2, 24}), &offload);
  for (const auto& block : model.blocks)
    CHECK_THROWS_WITH(block->weight.mul_(2), Contains("expected weights on cpu"));
  for (int64_t i = 0; i < 3; ++i) {
    offload.run(i, before, [&](const Tensor& x) {
      model.blocks[static_cast<size_t>(i)]->weight.mul_(2);
      return x;
    });
  }
  model(at::randn({2, 24}), &offload);
  offload.restore();
  CHECK(model.blocks[1]->weight.equal(before * 2));
}

TEST_CASE("a backward that fails leaves no block on the device", "[offload_weights]") {
  const auto folder = Folder();
  WeightedModel model;
  model.freeze();
  const Tensor batch = at::randn({2, 24}), expected = model(batch);
  OffloadWeights offload(OffloadWeightsOptions().folder(folder.path));
  for (const auto& block : model.blocks) offload.add(block->parameters());
  for (size_t last = 0; last < model.blocks.size(); ++last) {
    Tensor x = model.first->forward(batch);
    for (size_t i = 0; i < model.blocks.size(); ++i) {
      x = offload.run(static_cast<int64_t>(i), x, [&](const Tensor& y) {
        const Tensor z = model.blocks[i]->forward(y);
        if (i == last) z.register_hook([](const Tensor&) { TORCH_CHECK(false, "mine"); });
        return y + at::gelu(z);
      });
    }
    CHECK_THROWS_WITH(x.pow(2).mean().backward(), Contains("mine"));
  }
  const Tensor loss = model(batch, &offload);
  loss.backward();
  CHECK(loss.equal(expected));
  CHECK(offload.statistics().at("device") <= 2 * 4096);
}

TEST_CASE("offload_weights refuses what it cannot do", "[offload_weights]") {
  CHECK_THROWS_WITH(OffloadWeights(OffloadWeightsOptions()),
                    Contains("to: expected nvme:DIR for weights on the CPU"));
  CHECK_THROWS_WITH(OffloadWeights(OffloadWeightsOptions().folder("/nowhere")), Contains("/nowhere"));
  const auto folder = Folder();
  CHECK_THROWS_WITH(OffloadWeights(OffloadWeightsOptions().folder(folder.path).keep(-1)),
                    Contains("keep: expected"));
  OffloadWeights offload(OffloadWeightsOptions().folder(folder.path));
  const Tensor weight = at::ones({4, 4});
  offload.add({weight});
  CHECK_THROWS_WITH(offload.add({weight.view({16})}),
                    Contains("block 1: expected weights of its own, received one"));
}

TEST_CASE("an embedding and a head that are away give the same bits", "[offload_weights]") {
  const auto folder = Folder();
  at::manual_seed(7);
  const Tensor table = at::randn({70001, 64}), head = at::randn({3000, 64}),
               tokens = at::randint(70001, {2, 5});
  const Tensor target = at::randint(3000, {2, 5});
  const auto run = [&](const OffloadWeights* offload) {
    const Tensor x = (offload == nullptr ? at::embedding(table, tokens) : offload->embedding(table, tokens))
                         .clone()
                         .requires_grad_(true);
    const Tensor loss = shoestring::linear_cross_entropy(x, head, target) +
                        shoestring::linear_cross_entropy(x, table, tokens);
    loss.backward();
    return std::vector<Tensor>{x.detach(), loss.detach(), x.grad()};
  };
  const auto expected = run(nullptr);
  OffloadWeights offload(OffloadWeightsOptions().folder(folder.path));
  offload.add_table(table);
  offload.add_table(head);
  CHECK_THROWS_WITH(head.sum(), Contains("offload_weights: table [3000, 64]: expected weights on cpu"));
  const auto away = run(&offload);
  if (is_emulated()) {  // products of panels are rounded one after the other there
    for (size_t i = 0; i < expected.size(); ++i) CHECK(at::allclose(away[i], expected[i], 1e-4, 1e-5));
  } else {
    CHECK(same_weights(away, expected));
  }
  CHECK_THROWS_AS(offload.embedding(table, at::full({1}, -1, at::kLong)), c10::IndexError);
  CHECK_THROWS_WITH(offload.add_table(at::ones({2, 3, 4})),
                    Contains("expected a contiguous weight (rows, columns)"));
  CHECK_THROWS_WITH(offload.add_table(head), Contains("expected a weight of its own, received one"));
  const Tensor other = at::randn({4, 3});
  CHECK(offload.embedding(other, at::ones({2}, at::kLong)).equal(other.narrow(0, 1, 1).expand({2, 3})));
  offload.restore();
  CHECK(same_weights(run(nullptr), expected));
}

TEST_CASE("experts without tokens are not read from a file", "[offload_weights]") {
  if (is_emulated()) return;  // on a GPU, stacks travel with their block
  at::manual_seed(11);
  constexpr int64_t kExperts = 16, kFeatures = 32, kHidden = 24;
  const Tensor gate_up = at::randn({kExperts, 2 * kHidden, kFeatures}),
               down = at::randn({kExperts, kFeatures, kHidden}), x = at::randn({3, kFeatures}),
               index = at::tensor({2, 9, 9}, at::kLong).view({3, 1}), weight = at::ones({3, 1});
  const auto run = [&](const Tensor& input) {
    return shoestring::moe_experts(input, index, weight, gate_up, down);
  };
  const auto gradient = [&](OffloadWeights* offload) {
    const Tensor input = x.detach().clone().requires_grad_();
    const Tensor y = offload == nullptr ? run(input) : offload->run(0, input, run);
    y.pow(2).sum().backward();
    return std::make_pair(y.detach(), input.grad());
  };
  const auto expected = gradient(nullptr);
  const Tensor saved = gate_up.clone();

  const auto folder = Folder();
  OffloadWeights offload(OffloadWeightsOptions().folder(folder.path));
  REQUIRE_THROWS_WITH(offload.add({}, {}, {gate_up.narrow(1, 0, 4)}),
                      Contains("expected contiguous stacks (matrices, ...)"));
  offload.add({}, {}, {gate_up, down});
  const auto received = gradient(&offload);
  CHECK(received.first.equal(expected.first));
  CHECK(received.second.equal(expected.second));
  // Backward finds the experts where forward has left them.
  const auto bytes = static_cast<int64_t>((gate_up.nbytes() + down.nbytes()) / kExperts);
  CHECK(offload.statistics()["fetched"] == 2 * bytes);
  CHECK(offload.statistics()["device"] == 2 * bytes);
  REQUIRE_THROWS_WITH(gate_up.sum(), Contains("read or change them within present()"));
  offload.present(0, [&] { CHECK(gate_up.equal(saved)); }, /*changed=*/false);
  offload.restore();
  CHECK(gate_up.equal(saved));
}
