// Tests of FullyShard.

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <shoestring/adapters/lora.h>
#include <shoestring/checkpoint/autograd.h>
#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/runs/training.h>

#include "common.h"

namespace {

using shoestring::distributed::FullyShard;
using shoestring::distributed::FullyShardOptions;

std::vector<Tensor> copies_of(const std::vector<Tensor>& params) {
  std::vector<Tensor> all;
  for (const Tensor& p : params) all.push_back(p.detach().clone().requires_grad_());
  return all;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "none";
}

}  // namespace

// Steps have the bits of one process that has the mean of all ranks' gradients. The arguments are the
// optimizer, its state and rounding, the number of micro-batches, how they are added up ("sums" or "sends"),
// the ranks that split the parameters, whether the last parameter is unused on the last rank, where the parts
// are, and whether steps are in backward. Prints the bytes of state and weights of this rank, and what it has
// received and sent.
void fully_shard(char** arguments) {
  const GroupPtr all = connect();
  const int64_t rank = all->getRank(), size = all->getSize();
  const auto dtype = std::string(arguments[2]) == "nearest" ? at::kFloat : at::kBFloat16;
  const int64_t micro_batches = argument(arguments, 3, 1), split = argument(arguments, 5, size);
  const bool sums = arguments[4] == std::string("sums"), unused = argument(arguments, 6, 0) == 1;
  const Groups groups = groups_of(all, split);
  const char* offload = text(arguments, 7, "none");
  const bool in_backward = argument(arguments, 8, 0) == 1;
  const std::vector<std::vector<std::vector<int64_t>>> sizes{
      {{70, 41}, {5}}, {{0}, {300, 7}, {256}}, {{1}, {33, 33}}};
  std::vector<std::vector<Tensor>> blocks;
  std::vector<Tensor> own;
  torch::manual_seed(3);
  for (const auto& of_block : sizes) {
    blocks.emplace_back();
    for (const auto& shape : of_block) {
      if (arguments[0] == std::string("muon") && shape.size() != 2) continue;
      blocks.back().push_back(at::randn(shape).to(dtype).requires_grad_());
      own.push_back(blocks.back().back());
    }
  }
  const std::vector<Tensor> alone = copies_of(own);
  if (rank > 0) {
    const at::NoGradGuard no_grad;
    for (const Tensor& p : own) p.zero_();  // rank 0 gives its values
  }
  FullyShard sharded(groups.split,
                     FullyShardOptions().replicas(groups.replicas).find_unused(unused).offload(offload));
  for (const auto& block : blocks) sharded.add(block);
  const auto parts = sharded.parameters();
  const auto empty = std::count_if(own.begin(), own.end(), [](const Tensor& p) { return p.numel() == 0; });
  expect(std::ssize(parts) + empty == std::ssize(own), "a part of each parameter with elements");
  const auto ours = optimizer_of(parts, arguments);
  std::vector<Tensor> filled;  // an empty parameter has no part
  for (const Tensor& p : alone)
    if (p.numel() > 0) filled.push_back(p);
  const auto whole = optimizer_of(filled, arguments);
  ours->set_max_grad_norm(std::nullopt);
  whole->set_max_grad_norm(std::nullopt);
  ours->set_step_in_backward(in_backward);
  if (in_backward) ours->set_max_grad_norm(1e9);  // a step in backward clips by the norm of the step before
  // State in bf16 is rounded by other random numbers. Each rounding changes a step by less than 2^-7 of it.
  // The sums of LAMB, Adafactor and CAME are in another order, so each of four steps may round weights of up
  // to 4 in another way.
  const std::string optimizer = arguments[0];
  bool is_exact = arguments[1] != std::string("bf16");
  for (const char* sums_up : {"ademamix", "lamb", "adafactor", "adafactor_mean", "came"})
    is_exact &= optimizer != sums_up;
  const double tolerance = arguments[1] == std::string("fp32") ? 4 * 4.0 / (1 << 23) : 4 * 1e-2 / 128;
  const auto same = [&](size_t i, const std::string& when) {
    const bool good = is_exact ? own[i].equal(alone[i]) : at::allclose(own[i], alone[i], 1e-5, tolerance);
    expect(good, c10::str("parameter ", i, when));
  };
  const auto compare = [&](int64_t step) {
    sharded.present([&] {
      for (size_t i = 0; i < own.size(); ++i) same(i, c10::str(" after step ", step));
    });
  };
  compare(-1);
  for (int64_t step = 0; step < 4; ++step) {
    std::vector<Tensor> mean;
    for (const Tensor& p : alone) mean.push_back(at::zeros_like(p));
    for (int64_t micro = 0; micro < micro_batches; ++micro) {
      std::vector<Tensor> grads(own.size());
      for (int64_t of = 0; of < size; ++of) {
        const auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 * step + 10 * of + micro);
        for (size_t i = 0; i < own.size(); ++i) {
          if (unused && of == size - 1 && i + 1 == own.size()) continue;
          // integers, of which all sums are exact; the factor cancels the division by the number of ranks
          const Tensor grad =
              at::randint(-3, 4, alone[i].sizes(), generator, alone[i].options().requires_grad(false));
          mean[i] += grad;
          if (of == rank) grads[i] = grad;
        }
      }
      const auto adding = sums && micro + 1 < micro_batches ? sharded.accumulate() : nullptr;
      Tensor x = at::zeros({}, dtype);
      size_t i = 0;
      for (size_t b = 0; b < blocks.size(); ++b) {
        x = sharded.run(static_cast<int64_t>(b), x, [&](const Tensor& input) {
          Tensor y = input.clone();
          for (const Tensor& p : blocks[b]) {
            if (const Tensor grad = grads[i++]; grad.defined()) y = y + (p * grad * size).sum();
          }
          return y;
        });
      }
      x.backward();
    }
    for (const Tensor& p : own) expect(!p.grad().defined() || p.numel() == 0, "backward frees gradients");
    for (size_t i = 0; i < alone.size(); ++i) alone[i].mutable_grad() = mean[i];
    for (const Tensor& p : parts) expect(!in_backward || !p.grad().defined(), "steps free gradients");
    if (step == 2) {  // the norm is the same but for the order of its additions
      ours->set_max_grad_norm(1e9);
      whole->set_max_grad_norm(1e9);
    }
    ours->step();
    whole->step();
    ours->zero_grad();
    if (step >= 2) expect(at::allclose(ours->grad_norm(), whole->grad_norm(), 1e-6), "norms are equal");
    const auto before = sharded.statistics();
    compare(step);
    expect(step > 0 || before.at("gathered") > 0, "memory is used again");
  }
  const auto bytes = sharded.statistics();
  std::printf("%lld %lld %lld %lld\n", static_cast<long long>(state_bytes(*ours)),
              static_cast<long long>(bytes.at("own")), static_cast<long long>(bytes.at("received")),
              static_cast<long long>(bytes.at("sent")));
  sharded.restore();
  for (size_t i = 0; i < own.size(); ++i) same(i, " at the end");
}

// Training of a small network, with frozen bytes beside it, gives the gradients of one process that sees the
// batches of both ranks. The argument says where blocks are recomputed: "nowhere", "inside" or "outside" of
// run().
void fully_shard_adapters(char** arguments) {
  const std::string where = arguments[0];
  shoestring::install_autograd_engine();
  const GroupPtr group = connect();
  const int64_t size = group->getSize();
  torch::manual_seed(5);
  constexpr int64_t kBlocks = 4, kWidth = 24;
  std::vector<torch::nn::Sequential> nets, alone;
  std::vector<Tensor> codes, expected_codes;
  FullyShard sharded(group);
  for (int64_t i = 0; i < kBlocks; ++i) {
    nets.emplace_back(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh());
    alone.emplace_back(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh());
    const at::NoGradGuard no_grad;
    const auto from = nets.back()->parameters(), to = alone.back()->parameters();
    for (size_t p = 0; p < from.size(); ++p) to[p].copy_(from[p]);
    if (i == 1)
      nets.back()->parameters()[1].requires_grad_(false), alone.back()->parameters()[1].requires_grad_(false);
    codes.push_back(at::randint(0, 256, {1000 + i}, at::kByte));
    expected_codes.push_back(codes.back().clone());
    auto tensors = nets.back()->parameters();
    tensors.push_back(codes.back());
    sharded.add(tensors);
  }
  std::vector<Tensor> params;
  for (const auto& net : alone)
    for (const Tensor& p : net->parameters())
      if (p.requires_grad()) params.push_back(p);
  torch::optim::AdamW ours(sharded.parameters(), torch::optim::AdamWOptions(1e-2)),
      whole(params, torch::optim::AdamWOptions(1e-2));
  const auto input = [&](int64_t step, int64_t rank) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + rank);
    return at::randn({3, kWidth}, generator);
  };
  for (int64_t step = 0; step < 4; ++step) {
    Tensor x = input(step, group->getRank()).requires_grad_();
    for (int64_t i = 0; i < kBlocks; ++i) {
      const auto forward = [&, i](const Tensor& y) {
        expect(codes[static_cast<size_t>(i)].equal(expected_codes[static_cast<size_t>(i)]),
               "codes are whole");
        return nets[static_cast<size_t>(i)]->forward(y);
      };
      if (where == "inside") {
        x = sharded.run(i, x, [&](const Tensor& y) { return shoestring::checkpoint(forward, y); });
      } else if (where == "outside") {
        x = shoestring::checkpoint([&, i, forward](const Tensor& y) { return sharded.run(i, y, forward); },
                                   x);
      } else {
        x = sharded.run(i, x, forward);
      }
    }
    x.square().mean().backward();
    std::vector<std::vector<Tensor>> of_ranks;
    for (int64_t rank = 0; rank < size; ++rank) {
      Tensor y = input(step, rank);
      for (auto& net : alone) y = net->forward(y);
      y.square().mean().backward();
      of_ranks.emplace_back();
      for (const Tensor& p : params) of_ranks.back().push_back(std::exchange(p.mutable_grad(), Tensor()));
    }
    for (size_t i = 0; i < params.size(); ++i) {
      Tensor mean = of_ranks[0][i] / size;
      for (int64_t rank = 1; rank < size; ++rank) mean = mean + of_ranks[static_cast<size_t>(rank)][i] / size;
      params[i].mutable_grad() = mean;
    }
    const Tensor norm = sharded.clip_grad_norm_(0.05);
    double squares = 0;
    for (const Tensor& p : params) squares += p.grad().square().sum().to(at::kDouble).item<double>();
    expect(std::abs(norm.item<double>() - std::sqrt(squares)) < 1e-6 * norm.item<double>(), "norm");
    for (const Tensor& p : params) p.mutable_grad().mul_(std::min(1.0, 0.05 / (norm.item<double>() + 1e-6)));
    ours.step();
    whole.step();
    ours.zero_grad();
    whole.zero_grad();
    sharded.present([&] {
      for (int64_t i = 0; i < kBlocks; ++i) {
        const auto a = nets[static_cast<size_t>(i)]->parameters(),
                   b = alone[static_cast<size_t>(i)]->parameters();
        for (size_t p = 0; p < a.size(); ++p) {
          const bool same = size <= 2 ? a[p].equal(b[p]) : at::allclose(a[p], b[p], 1e-4, 1e-6);
          expect(same, c10::str("block ", i, ", parameter ", p, " after step ", step));
        }
      }
    });
  }
  // Values that all ranks change stay.
  sharded.present(
      [&] {
        const at::NoGradGuard no_grad;
        nets[0]->parameters()[0].fill_(2);
      },
      /*changed=*/true);
  sharded.present([&] { expect(nets[0]->parameters()[0].eq(2).all().item<bool>(), "changes stay"); });
}

// QLoRA: the codes of frozen weights are split, and gathered for each block. Losses are those of one process.
// Prints the bytes of this rank's parts, and of the dense weights in bf16.
void fully_shard_qlora(char**) {
  const GroupPtr group = connect();
  constexpr int64_t kBlocks = 3, kWidth = 256;
  std::vector<shoestring::nn::AdaptableLinear> layers, alone;
  torch::manual_seed(6);
  for (int64_t i = 0; i < kBlocks; ++i) {
    for (auto* all : {&layers, &alone}) {
      torch::manual_seed(i);
      torch::nn::Sequential holder(shoestring::nn::AdaptableLinear(kWidth, kWidth));
      shoestring::lora::apply(*holder,
                              shoestring::lora::ApplyOptions().quantize("nf4").double_quant(true).adapter(
                                  shoestring::nn::LoraOptions().rank(4).alpha(8)));
      all->push_back(std::dynamic_pointer_cast<shoestring::nn::AdaptableLinearImpl>(holder->ptr(0)));
    }
  }
  FullyShard sharded(group);
  std::vector<Tensor> params;
  for (auto& layer : layers) sharded.add(shoestring::training_tensors(*layer, /*frozen=*/true).values());
  for (auto& layer : alone) {
    for (const Tensor& p : layer->parameters())
      if (p.requires_grad()) params.push_back(p);
  }
  const auto options = shoestring::optim::AdamWOptions(1e-2).weight_decay(0);
  shoestring::optim::AdamW ours(sharded.parameters(), options), whole(params, options);
  for (int64_t step = 0; step < 4; ++step) {
    // All ranks have the same batch, so the mean of their gradients is the gradient of one process.
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
    const Tensor x = at::randn({8, kWidth}, generator);
    Tensor a = x, b = x;
    for (int64_t i = 0; i < kBlocks; ++i) {
      const auto number = static_cast<size_t>(i);
      a = sharded.run(i, a, [&](const Tensor& y) { return at::tanh(layers[number]->forward(y)); });
      b = at::tanh(alone[number]->forward(b));
    }
    const Tensor first = a.square().mean(), second = b.square().mean();
    expect(first.equal(second), c10::str("losses of step ", step));
    first.backward();
    second.backward();
    ours.step();
    whole.step();
    ours.zero_grad();
    whole.zero_grad();
  }
  std::printf("%lld %lld\n", static_cast<long long>(sharded.statistics().at("own")),
              static_cast<long long>(kBlocks * kWidth * kWidth * 2));
}

// An embedding that is the output layer as well is a block that runs twice in a forward. Losses are those of
// one process, also where a forward without gradients and present() come between backward and the step.
// Backward gathers the first layer alone: the others are there.
void fully_shard_tied(char**) {
  const GroupPtr group = connect();
  const int64_t size = group->getSize();
  struct Net {
    torch::nn::Embedding embedding{50, 24};
    std::array<torch::nn::Linear, 3> middle{torch::nn::Linear(24, 24), torch::nn::Linear(24, 24),
                                            torch::nn::Linear(24, 24)};
  };
  torch::manual_seed(8);
  Net own;
  torch::manual_seed(8);
  Net alone;
  FullyShard sharded(group);
  std::vector<Tensor> params;
  for (size_t i = 0; i < own.middle.size(); ++i) {
    sharded.add(own.middle[i]->parameters());
    for (const Tensor& p : alone.middle[i]->parameters()) params.push_back(p);
  }
  sharded.add(own.embedding->parameters(), /*keep=*/true);
  const auto last = std::ssize(own.middle);
  params.push_back(alone.embedding->weight);
  const auto options = shoestring::optim::SGDOptions(1).state_format("fp32");
  shoestring::optim::SGD ours(sharded.parameters(), options), whole(params, options);
  using Block = std::function<Tensor(const Tensor&)>;
  const auto loss_of = [last](Net& net, const Tensor& tokens, const auto& run) {
    Tensor x = run(last, tokens, Block([&](const Tensor& t) { return net.embedding(t); }));
    for (int64_t i = 0; i < last; ++i) {
      auto& layer = net.middle[static_cast<size_t>(i)];
      x = run(i, x, Block([&](const Tensor& y) { return at::tanh(layer(y)); }));
    }
    return run(last, x, Block([&](const Tensor& y) {
                 return (at::linear(y, net.embedding->weight) - 1).square().mean();
               }));
  };
  const auto split = [&](int64_t block, const Tensor& x, const Block& f) { return sharded.run(block, x, f); };
  const auto plain = [](int64_t, const Tensor& x, const Block& f) { return f(x); };
  const auto tokens = [&](int64_t step, int64_t rank) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + rank);
    return at::randint(0, 50, {6}, generator, at::kLong);
  };
  const auto compare = [&](int64_t step, const char* when) {
    const at::NoGradGuard no_grad;
    const Tensor a = loss_of(own, tokens(step, 0), split), b = loss_of(alone, tokens(step, 0), plain);
    expect(at::allclose(a, b, 1e-5), c10::str("loss ", when, " step ", step));
  };
  for (int64_t step = 0; step < 4; ++step) {
    const Tensor loss = loss_of(own, tokens(step, group->getRank()), split);
    const int64_t before = sharded.statistics().at("received");
    loss.backward();
    // 576 weights, and 24 biases from element 768 on: four pieces of 256 elements
    const int64_t of_layer = (4 + size - 1) / size * 256 * 4 * (size - 1);
    expect(sharded.statistics().at("received") - before == of_layer, "backward gathers one layer");
    for (int64_t rank = 0; rank < size; ++rank)
      (loss_of(alone, tokens(step, rank), plain) / static_cast<double>(size)).backward();
    compare(step, "before");
    sharded.present([] {});
    ours.step();
    whole.step();
    ours.zero_grad();
    whole.zero_grad();
    compare(step, "after");
  }
}

// Trains three steps, saves weights and optimizer, and trains two more steps ("train"); or loads them, saves
// them again, and trains two steps ("resume"). The other arguments are a folder, the name of the optimizer,
// and the ranks that split the parameters. Prints the sum of the squares of all weights.
void fully_shard_files(char** arguments) {
  const GroupPtr all = connect();
  const std::string how = arguments[0], folder = arguments[1];
  const Groups groups = groups_of(all, argument(arguments, 3, all->getSize()));
  torch::manual_seed(7);
  torch::nn::Sequential model(torch::nn::Linear(70, 41), torch::nn::Linear(41, 33));
  FullyShard sharded(groups.split, FullyShardOptions().replicas(groups.replicas));
  for (const auto& layer : model->children()) sharded.add(layer->parameters());
  char format[] = "8bit", rounding[] = "nearest";
  char* options[] = {arguments[2], format, rounding, nullptr};
  std::unique_ptr<torch::optim::Optimizer> made;
  if (arguments[2] == std::string("libtorch")) {
    made = std::make_unique<torch::optim::AdamW>(sharded.parameters(), torch::optim::AdamWOptions(1e-2));
  } else {
    made = optimizer_of(sharded.parameters(), options);
  }
  auto& optimizer = *made;
  int64_t step = 0;
  const auto train = [&](int64_t until) {
    for (; step < until; ++step) {
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + all->getRank());
      Tensor x = at::randn({5, 70}, generator);
      for (size_t i = 0; i < 2; ++i)
        x = sharded.run(static_cast<int64_t>(i), x,
                        [&](const Tensor& y) { return model->ptr<torch::nn::LinearImpl>(i)->forward(y); });
      x.square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  shoestring::TrainingRun run{shoestring::training_tensors(*model), {&optimizer}, {}};
  const std::string path = folder + "/run.safetensors";
  if (how == "train") {
    train(3);
    run.step = step;
    shoestring::save_training(path, run);
    sharded.present([&] { shoestring::save_training(folder + "/present.safetensors", run); });
  } else {
    if (all->getSize() == 2) {
      sharded.present([&] { shoestring::load_training(path, run); }, /*changed=*/true);
    } else {
      shoestring::load_training(path, run);
    }
    step = run.step;
    shoestring::save_training(folder + "/again.safetensors", run);
  }
  train(5);
  sharded.restore();
  double sum = 0;
  for (const Tensor& p : model->parameters()) sum += p.square().sum(at::kDouble).item<double>();
  std::printf("%.17g\n", sum);
}

// Prints what is refused.
void fully_shard_refuses(char**) {
  const GroupPtr group = connect();
  const auto param = [](at::IntArrayRef sizes) { return at::ones(sizes).requires_grad_(); };
  const Tensor shared = param({8, 8}), unused = param({3});
  FullyShard sharded(group);
  sharded.add({shared, unused});
  const auto transposed = at::ones({8, 4}).t().requires_grad_();
  const auto differs = param({group->getRank() + 4});
  using shoestring::optim::AdamW;
  AdamW optimizer(sharded.parameters());
  for (const auto& text : {
           error_of([&] { sharded.add({shared}); }),
           error_of([&] { sharded.add({transposed}); }),
           error_of([&] { sharded.add({differs}); }),
           error_of([&] { shared.sum(); }),
           error_of([&] { sharded.run(3, at::ones({8}), [](const Tensor& x) { return x; }); }),
           error_of([&] { sharded.shard(differs); }),
           error_of([&] { shoestring::distributed::shard(optimizer, group); }),
           error_of([&] {
             sharded.run(0, at::ones({8}), [&](const Tensor& x) { return shared.matmul(x); })
                 .sum()
                 .backward();
           }),
           error_of([&] {
             FullyShard thawed(group);
             const Tensor frozen = at::ones({5});
             thawed.add({param({8}), frozen});
             frozen.set_requires_grad(true);
             thawed.run(0, at::ones({8}), [](const Tensor& x) { return x; });
           }),
           error_of([&] { shoestring::optim::Muon muon(sharded.parameters()); }),
           error_of([&] { shoestring::optim::CAME(sharded.parameters()).set_offload("stream"); }),
           error_of([&] { shoestring::optim::LAMB(sharded.parameters()).set_step_in_backward(true); }),
           error_of([&] { FullyShard(group, FullyShardOptions().offload("disk")); }),
           error_of([&] { FullyShard(group, FullyShardOptions().offload("nvme:/missing")); }),
           error_of([&] { FullyShard(group, FullyShardOptions().offload("cpu")).add({param({4})}); }),
           error_of([&] { shoestring::distributed::new_group(group, {0, 7}); }),
           error_of([&] { FullyShard few(group, FullyShardOptions().compress("2bit")); }),
           error_of([&] {
             FullyShard few(group, FullyShardOptions().compress("8bit"));
             few.add({at::ones({3}, at::kDouble).requires_grad_()});
           }),
       })
    std::printf("%s\n", text.c_str());
}

// Backward sends gradients when all accumulate() of all threads have ended.
void fully_shard_threads(char**) {
  const GroupPtr group = connect();
  const Tensor param = at::ones({300}).requires_grad_();
  FullyShard sharded(group);
  sharded.add({param});
  in_two_threads([&] {
    for (int i = 0; i < 1000000; ++i) static_cast<void>(sharded.accumulate());
  });
  sharded.run(0, at::zeros({}), [&](const Tensor& x) { return x + param.sum(); }).backward();
  const Tensor grad = sharded.shard(param).grad();
  expect(grad.defined() && grad.equal(at::ones_like(grad)), "the gradient is sent");
}
