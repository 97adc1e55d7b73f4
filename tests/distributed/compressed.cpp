// Tests of FullyShard with gradients in few bits.

#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "common.h"

namespace {

using shoestring::distributed::FullyShard;
using shoestring::distributed::FullyShardOptions;

struct Trained {
  double untrained, loss;  // of a fixed batch, before and after 40 steps
  double apart;            // the largest difference between weights of ranks
};

Trained train(const Groups& groups, const GroupPtr& all, const std::string& compress) {
  torch::manual_seed(5);
  std::vector<torch::nn::Linear> layers;
  for (const auto& [from, to] : {std::pair{64, 48}, {48, 48}, {48, 5}}) layers.emplace_back(from, to);
  const auto options = FullyShardOptions().replicas(groups.replicas).compress(compress);
  const auto loss_of_batch = [&] {
    const Tensor x = at::randn({64, 64}, at::make_generator<at::CPUGeneratorImpl>(99));
    Tensor y = x;
    for (auto& layer : layers) y = at::tanh(layer(y));
    return (y - x.narrow(1, 0, 5).tanh()).square().mean().item<double>();
  };
  const double untrained = loss_of_batch();
  FullyShard sharded(groups.split, options);
  for (auto& layer : layers) sharded.add(layer->parameters());
  shoestring::optim::AdamW optimizer(sharded.parameters(), shoestring::optim::AdamWOptions(3e-3));
  optimizer.set_max_grad_norm(1.0);
  const auto loss_of = [&](int64_t seed) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
    const Tensor x = at::randn({16, 64}, generator);
    Tensor y = x;
    for (size_t i = 0; i < layers.size(); ++i)
      y = sharded.run(static_cast<int64_t>(i), y, [&](const Tensor& t) { return at::tanh(layers[i](t)); });
    return (y - x.narrow(1, 0, 5).tanh()).square().mean();
  };
  for (int64_t step = 0; step < 40; ++step) {
    loss_of(100 * step + all->getRank()).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  sharded.restore();
  Tensor weights = at::zeros({0});
  for (auto& layer : layers)
    for (const Tensor& p : layer->parameters()) weights = at::cat({weights, p.detach().reshape({-1})});
  std::vector<Tensor> least{weights.clone()}, most{weights.clone()};
  c10d::AllreduceOptions smallest, largest;
  smallest.reduceOp = c10d::ReduceOp::MIN;
  largest.reduceOp = c10d::ReduceOp::MAX;
  shoestring::distributed::wait_for(all, all->allreduce(least, smallest), "least weights");
  shoestring::distributed::wait_for(all, all->allreduce(most, largest), "largest weights");
  return {untrained, loss_of_batch(), (most[0] - least[0]).abs().max().item<double>()};
}

}  // namespace

// The means that arrive in codes add up to the means of all gradients. The arguments are the bits, the ranks
// that split the parameters, and how three micro-batches are added up: "sums" or "sends". Prints the bytes of
// residuals, what this rank sends in a step, and its part of each block.
void fully_shard_compressed(char** arguments) {
  const GroupPtr all = connect();
  const int64_t rank = all->getRank(), size = all->getSize();
  const std::string bits = arguments[0];
  const bool is_sign = bits == "1bit", sums = arguments[2] == std::string("sums");
  const Groups groups = groups_of(all, argument(arguments, 1, size));
  std::vector<std::vector<Tensor>> blocks{
      {at::zeros({64, 40}), at::zeros({5})}, {at::zeros({300, 7}), at::zeros({256})}, {at::zeros({33, 33})}};
  for (const auto& block : blocks)
    for (const Tensor& p : block) p.requires_grad_();
  const auto options = FullyShardOptions().replicas(groups.replicas).compress(bits).find_unused(true);
  FullyShard sharded(groups.split, options);
  for (const auto& block : blocks) sharded.add(block);
  torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(1));
  // Steps without gradients follow: each sends what the codes before it have left out, and leaves at most 1 /
  // 14 of it out in 4 bits. Signs leave out more than a gradient has for a while, so they get the same
  // gradients in many steps.
  const int64_t steps = is_sign ? 64 : 5, all_steps = is_sign ? 64 : 13, micro_batches = 3;
  std::vector<std::vector<Tensor>> expected;
  for (const auto& block : blocks) {
    expected.emplace_back();
    for (const Tensor& p : block) expected.back().push_back(at::zeros(p.sizes(), at::kDouble));
  }
  int64_t sent = 0;
  for (int64_t step = 0; step < all_steps; ++step) {
    for (int64_t micro = 0; micro < micro_batches; ++micro) {
      std::vector<std::vector<Tensor>> grads = expected;
      for (int64_t of = 0; of < size; ++of) {
        const auto generator =
            at::make_generator<at::CPUGeneratorImpl>((is_sign ? 0 : 1000 * step) + 10 * of + micro);
        for (size_t b = 0; b < blocks.size(); ++b) {
          for (size_t i = 0; i < blocks[b].size(); ++i) {
            Tensor grad = at::randint(-3, 4, blocks[b][i].sizes(), generator, at::kFloat);
            if (step >= steps) grad.zero_();
            expected[b][i] += grad / size;
            if (of == rank) grads[b][i] = grad;
          }
        }
      }
      const auto adding = sums && micro + 1 < micro_batches ? sharded.accumulate() : nullptr;
      Tensor x = at::zeros({});
      for (size_t b = 0; b < blocks.size(); ++b) {
        x = sharded.run(static_cast<int64_t>(b), x, [&](const Tensor& input) {
          Tensor y = input.clone();
          for (size_t i = 0; i < blocks[b].size(); ++i) y = y + (blocks[b][i] * grads[b][i]).sum();
          return y;
        });
      }
      x.backward();
    }
    optimizer.step();
    for (const Tensor& p : sharded.parameters()) p.mutable_grad() = Tensor();
    if (step == 0) sent = sharded.statistics().at("sent");
  }
  const auto bytes = sharded.statistics();
  expect(bytes.at("sent") == all_steps * sent, "all steps send the same number of bytes");
  sharded.present([&] {
    for (size_t b = 0; b < blocks.size(); ++b) {
      for (size_t i = 0; i < blocks[b].size(); ++i) {
        const Tensor error = blocks[b][i].detach() + expected[b][i];
        const std::string what = c10::str("the sum of gradients of block ", b, ", parameter ", i);
        if (!is_sign) {
          // Each of at most 5 roundings in a micro-batch is half a unit in the last place of a sum below 64.
          const double most = static_cast<double>(all_steps * micro_batches) * 5 * 64 / (1 << 24);
          expect(error.abs().max().item<double>() <= most, what);
        } else if (i == 0 && b == 0) {
          // Signs with a mean magnitude leave out half of such a gradient. Without error feedback, half of
          // the sum would be missing; with it, the residuals of two hops, a few gradients of 64.
          const double missing = (error.norm() / expected[b][i].norm()).item<double>();
          expect(missing < 0.2, c10::str(what, ": ", missing, " of it is missing"));
        }
      }
    }
  });
  std::printf("%lld %lld %lld\n", static_cast<long long>(bytes.at("residuals")), static_cast<long long>(sent),
              static_cast<long long>(bytes.at("own")));
  sharded.restore();

  const Trained whole = train(groups, all, "none"), few = train(groups, all, bits);
  expect(whole.apart == 0 && few.apart == 0, "all ranks have the same weights");
  expect(whole.loss < whole.untrained / 2, "training lowers the loss");
  const double part = bits == "8bit" ? 0.01 : is_sign ? 0.2 : 0.05;
  expect(std::abs(few.loss - whole.loss) <= part * (whole.untrained - whole.loss) &&
             (few.loss != whole.loss) == (size > 1),
         c10::str("a loss near that of whole gradients, ", whole.loss, ", received ", few.loss));
}
