// One process of a test of several. The first argument names the test; the environment says which rank this
// is. A test prints lines that tests/python/distributed compares, and "passed" at its end.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <shoestring/checkpoint/autograd.h>
#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/distributed/distributed.h>
#include <shoestring/optim.h>

#include "common.h"

namespace {

using at::Tensor;
using shoestring::distributed::DataParallel;
using shoestring::distributed::DataParallelOptions;
using shoestring::distributed::GroupPtr;
using shoestring::distributed::mean_over_ranks;
using shoestring::distributed::wait_for;

// Every collective, with numbers that all dtypes hold exactly.
void collectives(char**) {
  const GroupPtr group = connect();
  const int64_t rank = group->getRank(), size = group->getSize();
  const auto all = at::arange(size);  // the ranks
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kLong, at::kChar, at::kByte}) {
    const std::string name = c10::toString(dtype);
    const auto options = at::TensorOptions(dtype);
    const auto run = [&](const char* what, const c10::intrusive_ptr<c10d::Work>& work) {
      wait_for(group, work, what + (" of " + name));
    };
    for (const int64_t count : {0, 1, 7, 4097}) {
      const Tensor own = at::full({count}, rank + 1, options);
      std::vector<Tensor> sum{own.clone()};
      run("all_reduce", group->allreduce(sum));
      expect(sum[0].eq(size * (size + 1) / 2).all().item<bool>(), "all_reduce of " + name);

      std::vector<Tensor> first{own.clone()};
      run("broadcast", group->broadcast(first));
      expect(first[0].eq(1).all().item<bool>(), "broadcast of " + name);

      std::vector<Tensor> input{own};
      std::vector<std::vector<Tensor>> gathered(1);
      for (int64_t i = 0; i < size; ++i) gathered[0].push_back(at::empty({count}, options));
      run("all_gather", group->allgather(gathered, input));
      for (int64_t i = 0; i < size; ++i)
        expect(gathered[0][i].eq(i + 1).all().item<bool>(), "all_gather of " + name);

      Tensor together = at::empty({size * count}, options), mine = own;
      run("all_gather_into_tensor", group->_allgather_base(together, mine));
      expect(together.equal((all + 1).to(dtype).repeat_interleave(count)),
             "all_gather_into_tensor of " + name);

      // each rank sends its number to all, and receives those of all
      Tensor sent = at::full({size * count}, rank + 1, options), received = at::empty_like(sent);
      std::vector<int64_t> even;
      run("all_to_all", group->alltoall_base(received, sent, even, even));
      expect(received.equal(together), "all_to_all of " + name);
      if (dtype != at::kFloat && dtype != at::kBFloat16) continue;
      Tensor part = at::empty({count}, options), whole = together.clone();
      run("reduce_scatter", group->_reduce_scatter_base(part, whole));
      expect(part.eq(size * (rank + 1)).all().item<bool>(), "reduce_scatter of " + name);
    }
    if (size == 1) continue;
    std::vector<Tensor> sent{at::full({5}, rank + 1, options)}, received{at::empty({5}, options)};
    const int64_t next = (rank + 1) % size, before = (rank + size - 1) % size;
    const auto send = group->send(sent, static_cast<int>(next), 0);
    run("recv", group->recv(received, static_cast<int>(before), 0));
    run("send", send);
    expect(received[0].eq(before + 1).all().item<bool>(), "send and recv of " + name);
  }
  expect(mean_over_ranks(group, at::full({}, static_cast<double>(rank))).item<double>() ==
             static_cast<double>(size - 1) / 2,
         "mean_over_ranks");
  wait_for(group, group->barrier(), "barrier");
}

// A network whose losses and gradients are sums of small integers, times powers of two. Every order of
// addition gives the same bits.
struct ExactImpl : torch::nn::Module {
  explicit ExactImpl(int64_t seed) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
    const auto draw = [&](at::IntArrayRef sizes) {
      return at::randint(-2, 3, sizes, generator, at::kFloat).div_(4).set_requires_grad(true);
    };
    first = register_parameter("first", draw({8, 6}));
    second = register_parameter("second", draw({6, 4}));
    bias = register_parameter("bias", draw({4}));
    unused = register_parameter("unused", draw({3}), /*requires_grad=*/false);
    count = register_buffer("count", at::full({}, seed, at::kLong));
  }
  Tensor forward(const Tensor& x) { return x.matmul(first).matmul(second) + bias; }
  Tensor first, second, bias, unused, count;
};
TORCH_MODULE(Exact);

Tensor inputs(int64_t step, int64_t rank, int64_t micro) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + 10 * rank + micro);
  return at::randint(-3, 4, {4, 8}, generator, at::kFloat);
}

// Gradients averaged over ranks are those of the whole batch in one process, bit for bit.
void data_parallel(char** arguments) {
  const int64_t bucket_bytes = argument(arguments, 0, 64), micro_batches = argument(arguments, 1, 1);
  const GroupPtr group = connect();
  const int64_t rank = group->getRank(), size = group->getSize();
  Exact model(rank), whole(0);  // the model of rank 0 is broadcast
  const bool views = argument(arguments, 2, 0) == 1;
  DataParallel parallel(*model, group,
                        DataParallelOptions().bucket_bytes(bucket_bytes).gradient_as_bucket_view(views));
  expect(model->count.item<int64_t>() == 0 && model->unused.equal(whole->unused), "buffers are broadcast");
  for (int64_t step = 0; step < 3; ++step) {
    for (int64_t micro = 0; micro < micro_batches; ++micro) {
      // The factor cancels the division by the number of ranks without rounding.
      const Tensor loss = model->forward(inputs(step, rank, micro)).sum() * size;
      micro + 1 < micro_batches ? loss.backward() : parallel.backward(loss);
      for (int64_t other = 0; other < size; ++other)
        whole->forward(inputs(step, other, micro)).sum().backward();
    }
    for (const auto& item : whole->named_parameters()) {
      const Tensor own = model->named_parameters()[item.key()].grad(), expected = item.value().grad();
      expect(own.defined() == expected.defined() && (!own.defined() || own.equal(expected)),
             "gradient of " + item.key());
    }
    model->zero_grad();
    whole->zero_grad();
  }
}

// The gradients of two threads add up.
void data_parallel_threads(char**) {
  const GroupPtr group = connect();
  const int64_t rank = group->getRank(), size = group->getSize();
  Exact model(0), whole(0);
  DataParallel parallel(*model, group, DataParallelOptions().bucket_bytes(64));
  constexpr int64_t kSteps = 50;
  in_two_threads([&] {
    for (int64_t step = 0; step < kSteps; ++step)
      parallel.backward(model->forward(inputs(0, rank, 0)).sum() * size);
  });
  for (int64_t other = 0; other < size; ++other)
    (whole->forward(inputs(0, other, 0)).sum() * (2 * kSteps)).backward();
  for (const auto& item : whole->named_parameters()) {
    if (!item.value().requires_grad()) continue;
    expect(model->named_parameters()[item.key()].grad().equal(item.value().grad()),
           "gradient of " + item.key());
  }
}

// checkpoint replaces autograd's engine, and the Reducer of DataParallel queues a callback in it.
void checkpointed(char**) {
  shoestring::install_autograd_engine();
  const GroupPtr group = connect();
  const int64_t rank = group->getRank(), size = group->getSize();
  Exact model(rank), whole(0);
  DataParallel parallel(*model, group);
  for (int64_t step = 0; step < 3; ++step) {
    const Tensor x = inputs(step, rank, 0).requires_grad_();
    const auto layer = [&](const Tensor& in) { return model->forward(in); };
    parallel.backward(shoestring::checkpoint(layer, x).sum() * size);
    for (int64_t other = 0; other < size; ++other) whole->forward(inputs(step, other, 0)).sum().backward();
    expect(model->first.grad().equal(whole->first.grad()), "gradient of a recomputed layer");
    model->zero_grad();
    whole->zero_grad();
  }
}

// Trains with our 8-bit AdamW. All ranks must stay equal, and the losses are printed. The arguments are the
// number of steps, how gradients are compressed, and whether they are split (1).
void train_processes(char** arguments) {
  const int64_t steps = argument(arguments, 0, 5);
  const bool has_more = arguments[0] != nullptr && arguments[1] != nullptr;
  const std::string compress = has_more ? arguments[1] : "none";
  const bool splits = has_more && argument(arguments, 2, 0) == 1;
  const GroupPtr group = connect();
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(32, 64), torch::nn::GELU(), torch::nn::Linear(64, 32));
  shoestring::optim::AdamW optimizer(model->parameters(),
                                     shoestring::optim::AdamWOptions(1e-2).state_format("8bit"));
  std::optional<DataParallel> parallel;
  if (splits) {
    using shoestring::distributed::ShardOptions;
    shoestring::distributed::broadcast_module(*model, group);
    shoestring::distributed::shard(optimizer, group,
                                   ShardOptions().gradients(true).bucket_bytes(4096).compress(compress));
  } else {
    parallel.emplace(
        *model, group,
        DataParallelOptions().gradient_as_bucket_view(true).bucket_bytes(4096).compress(compress));
  }
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  for (int64_t step = 0; step < steps; ++step) {
    const Tensor x = at::randn({24, 32}, generator);
    const int64_t rows = 24 / group->getSize();
    const Tensor own = x.narrow(0, group->getRank() * rows, rows);
    const Tensor loss = (model->forward(own) - own).square().mean();
    splits ? loss.backward() : parallel->backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    const double mean = mean_over_ranks(group, loss.to(at::kDouble)).item<double>();
    if (group->getRank() == 0) std::printf("%.9f\n", mean);
  }
  for (const Tensor& p : model->parameters()) {
    std::vector<Tensor> input{p.detach()};
    std::vector<std::vector<Tensor>> all(1);
    for (int i = 0; i < group->getSize(); ++i) all[0].push_back(at::empty_like(p));
    wait_for(group, group->allgather(all, input), "all_gather");
    for (const Tensor& other : all[0]) expect(other.equal(p), "parameters of all ranks are equal");
  }
}

// Ranks count different numbers of tokens. The gradient is that of the mean over all tokens.
void tokens(char**) {
  const GroupPtr group = connect();
  const int64_t rank = group->getRank(), size = group->getSize();
  Exact model(0);
  DataParallel parallel(*model, group);
  const auto rows = [](int64_t of) { return at::ones({int64_t{1} << of, 8}); };
  const Tensor count = at::full({}, rows(rank).size(0), at::kDouble);
  parallel.backward(model->forward(rows(rank)).sum() / mean_over_ranks(group, count));
  Exact whole(0);
  std::vector<Tensor> all;
  for (int64_t other = 0; other < size; ++other) all.push_back(rows(other));
  const Tensor x = at::cat(all);
  (whole->forward(x).sum() / x.size(0)).backward();
  expect(at::allclose(model->first.grad(), whole->first.grad(), 1e-6),
         "gradient of the mean over all tokens");
}

// Steps that processes split have the bits of steps that each process takes alone. Prints the bytes of state.
void zero(char** arguments) {
  const GroupPtr group = connect();
  const auto dtype = std::string(arguments[2]) == "nearest" ? at::kFloat : at::kBFloat16;
  std::vector<Tensor> own, alone;
  torch::manual_seed(3);
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{70, 41}, {5}, {0}, {300, 7}, {256}, {1}, {33, 33}}) {
    if (arguments[0] == std::string("muon") && sizes.size() != 2) continue;
    const Tensor values = at::randn(sizes).to(dtype);
    own.push_back(values.clone().requires_grad_());
    alone.push_back(values.clone().requires_grad_());
  }
  const auto split = optimizer_of(own, arguments), whole = optimizer_of(alone, arguments);
  shoestring::distributed::shard(*split, group);
  for (int64_t step = 0; step < 4; ++step) {
    for (size_t i = 0; i < own.size(); ++i) {
      own[i].mutable_grad() = at::randn(own[i].sizes()).to(dtype);
      alone[i].mutable_grad() = own[i].grad().clone();
    }
    split->step();
    whole->step();
    split->zero_grad();
    for (size_t i = 0; i < own.size(); ++i)
      expect(own[i].equal(alone[i]), c10::str("parameter ", i, " after step ", step));
    expect(split->grad_norm().equal(whole->grad_norm()), "norms are equal");
  }
  std::printf("%lld %lld\n", static_cast<long long>(state_bytes(*split)),
              static_cast<long long>(state_bytes(*whole)));
}

// Split gradients give the steps of one process that has the mean of all ranks' gradients. The arguments are
// those of `zero`, the bytes of a bucket, the number of micro-batches, how they are added up ("sums" or
// "sends"), and what the last parameter does: "all", or on the last rank "unused", or "late" left out of the
// last micro-batch.
void split_gradients(char** arguments) {
  using shoestring::distributed::ShardOptions;
  const GroupPtr group = connect();
  const int64_t rank = group->getRank(), size = group->getSize();
  const auto dtype = std::string(arguments[2]) == "nearest" ? at::kFloat : at::kBFloat16;
  const int64_t bucket_bytes = argument(arguments, 3, 64), micro_batches = argument(arguments, 4, 1);
  const bool sums = arguments[5] == std::string("sums"), unused = arguments[6] == std::string("unused");
  const bool late = arguments[6] == std::string("late");
  std::vector<Tensor> own, alone;
  torch::manual_seed(3);
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{70, 41}, {5}, {0}, {300, 7}, {256}, {1}, {33, 33}}) {
    if (arguments[0] == std::string("muon") && sizes.size() != 2) continue;
    const Tensor values = at::randn(sizes).to(dtype);
    own.push_back(values.clone().requires_grad_());
    alone.push_back(values.clone().requires_grad_());
  }
  const auto split = optimizer_of(own, arguments), whole = optimizer_of(alone, arguments);
  split->set_max_grad_norm(std::nullopt);
  whole->set_max_grad_norm(std::nullopt);
  shoestring::distributed::shard(
      *split, group, ShardOptions().gradients(true).bucket_bytes(bucket_bytes).find_unused(unused || late));
  for (int64_t step = 0; step < 4; ++step) {
    std::vector<Tensor> mean;
    for (const Tensor& p : own) mean.push_back(at::zeros_like(p));
    for (int64_t micro = 0; micro < micro_batches; ++micro) {
      Tensor loss = at::zeros({}, dtype);
      for (int64_t of = 0; of < size; ++of) {
        const auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 * step + 10 * of + micro);
        for (size_t i = 0; i < own.size(); ++i) {
          const bool leaves = unused || (late && micro + 1 == micro_batches);
          if (leaves && of == size - 1 && i + 1 == own.size()) continue;
          // integers, of which all sums are exact; the factor cancels the division by the number of ranks
          const Tensor grad = at::randint(-3, 4, own[i].sizes(), generator, own[i].options());
          mean[i] += grad;
          if (of == rank) loss = loss + (own[i] * grad * size).sum();
        }
      }
      const auto adding = sums && micro + 1 < micro_batches ? split->accumulate() : nullptr;
      loss.backward();
    }
    for (size_t i = 0; i < own.size(); ++i) {
      expect(!own[i].grad().defined(), "backward frees gradients");
      alone[i].mutable_grad() = mean[i];
    }
    if (step == 2) {  // the norm is the same but for the order of its additions
      split->set_max_grad_norm(1e9);
      whole->set_max_grad_norm(1e9);
    }
    split->step();
    whole->step();
    split->zero_grad();
    for (size_t i = 0; i < own.size(); ++i)
      expect(own[i].equal(alone[i]), c10::str("parameter ", i, " after step ", step));
    if (step >= 2) expect(at::allclose(split->grad_norm(), whole->grad_norm(), 1e-6), "norms are equal");
  }
}

// Takes three steps and saves the optimizer, or loads it and compares the next steps with those of one
// process. The last two arguments are a folder, and "save" or "load".
void zero_files(char** arguments) {
  const GroupPtr group = connect();
  const std::string folder = arguments[3], how = arguments[4];
  const auto train = [&](const std::vector<Tensor>& params, shoestring::optim::LowMemoryOptimizer& optimizer,
                         int64_t first, int64_t last) {
    for (int64_t step = first; step < last; ++step) {
      torch::manual_seed(step);
      for (const Tensor& p : params) p.mutable_grad() = at::randn(p.sizes());
      optimizer.step();
    }
  };
  const auto fresh = [] {
    torch::manual_seed(3);
    std::vector<Tensor> params;
    for (const std::vector<int64_t>& sizes :
         std::vector<std::vector<int64_t>>{{70, 41}, {5}, {300, 7}, {256}, {33, 33}})
      params.push_back(at::randn(sizes).requires_grad_());
    return params;
  };
  const auto own = fresh(), alone = fresh();
  const auto split = optimizer_of(own, arguments), whole = optimizer_of(alone, arguments);
  shoestring::distributed::shard(*split, group);
  train(alone, *whole, 0, 3);
  const std::string path = folder + "/optimizer.safetensors", archive = folder + "/optimizer.pt";
  if (how == "save") {
    train(own, *split, 0, 3);
    shoestring::optim::save_optimizer(*split, path);
    train(own, *split, 3, 5);  // saving leaves the optimizer as it was
    train(alone, *whole, 3, 5);
  } else {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < own.size(); ++i) own[i].copy_(alone[i]);
    shoestring::optim::load_optimizer(*split, path);
    train(own, *split, 3, 5);
    // a second load, into an optimizer that has stepped
    for (size_t i = 0; i < own.size(); ++i) own[i].copy_(alone[i]);
    shoestring::optim::load_optimizer(*split, path);
    train(own, *split, 3, 5);
    train(alone, *whole, 3, 5);
  }
  for (size_t i = 0; i < own.size(); ++i) expect(own[i].equal(alone[i]), c10::str("parameter ", i));
}

// Prints what an optimizer refuses before processes split it, and afterwards.
void zero_refuses(char**) {
  const GroupPtr group = connect();
  const auto error_of = [](const auto& call) {
    try {
      call();
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string("none");
  };
  using shoestring::optim::AdamW;
  const Tensor p = at::ones({300}).requires_grad_();
  AdamW split({p}), stepped({p}), offloaded({p}), transposed({at::ones({20, 30}).t().requires_grad_()});
  shoestring::distributed::shard(split, group);
  p.mutable_grad() = at::ones({300});
  stepped.step();
  offloaded.set_offload("cpu");
  for (const auto& text :
       {error_of([&] { shoestring::distributed::shard(stepped, group); }),
        error_of([&] { shoestring::distributed::shard(offloaded, group); }),
        error_of([&] { shoestring::distributed::shard(transposed, group); }),
        error_of([&] { split.set_offload("cpu"); }), error_of([&] { split.set_step_in_backward(true); })})
    std::printf("%s\n", text.c_str());
}

// Prints what compression refuses.
void compress_refuses(char**) {
  using shoestring::distributed::ShardOptions;
  const GroupPtr group = connect();
  const auto print_error = [](const auto& call) {
    try {
      call();
    } catch (const c10::Error& error) {
      std::printf("%s\n", error.what_without_backtrace());
    }
  };
  const auto options = DataParallelOptions().compress("8bit");
  torch::nn::Linear model(4, 4), precise(4, 4);
  precise->to(at::kDouble);
  shoestring::optim::SGD whole(model->parameters(), shoestring::optim::SGDOptions(0.1));
  print_error([&] { DataParallel(*model, group, DataParallelOptions().compress("2bit")); });
  print_error([&] { DataParallel(*precise, group, options); });
  print_error([&] { shoestring::distributed::shard(whole, group, ShardOptions().compress("8bit")); });
  print_error(
      [&] { shoestring::distributed::shard(whole, group, ShardOptions().gradients(true).compress("half")); });
}

// Prints the median of the seconds of a step, for benchmarks/distributed. The arguments are "alone",
// "parallel", "shard", "gradients" or "fully", the width and the rows.
void time_steps(char** arguments) {
  using shoestring::distributed::FullyShard;
  using shoestring::distributed::ShardOptions;
  const std::string kind = arguments[0];
  const int64_t width = argument(arguments, 1, 64), rows = argument(arguments, 2, 8);
  const GroupPtr group = connect();
  torch::manual_seed(0);
  std::vector<torch::nn::Linear> layers;
  torch::nn::Sequential model;
  for (int i = 0; i < 8; ++i) {
    layers.emplace_back(width, width);
    model->push_back(layers.back());
  }
  std::optional<DataParallel> parallel;
  std::optional<FullyShard> fully;
  if (kind == "parallel" || kind == "shard") parallel.emplace(*model, group);
  if (kind == "fully") {
    fully.emplace(group);
    for (const auto& layer : layers) fully->add(layer->parameters());
  }
  shoestring::optim::AdamW optimizer(fully ? fully->parameters() : model->parameters(),
                                     shoestring::optim::AdamWOptions(1e-6));
  if (kind == "shard" || kind == "gradients")
    shoestring::distributed::shard(optimizer, group, ShardOptions().gradients(kind == "gradients"));
  const Tensor x = at::randn({rows, width});
  const auto forward = [&] {
    Tensor y = x;
    if (!fully) return model->forward(y);
    for (size_t i = 0; i < layers.size(); ++i)
      y = fully->run(static_cast<int64_t>(i), y, [&](const Tensor& input) { return layers[i](input); });
    return y;
  };
  std::vector<double> seconds;
  for (int step = 0; step < 12; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    const Tensor loss = forward().square().mean();
    parallel.has_value() ? parallel->backward(loss) : loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    if (step >= 2) seconds.push_back(taken.count());
  }
  std::sort(seconds.begin(), seconds.end());
  if (group->getRank() == 0) std::printf("%.6f\n", (seconds[4] + seconds[5]) / 2);
}

// Rank 1 has another model.
void other_model(char** arguments) {
  const GroupPtr group = connect();
  const bool differs = group->getRank() == 1;
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, differs ? 3 : 2));
  if (differs && argument(arguments, 0, 0) == 1) model->push_back(torch::nn::Linear(2, 2));
  DataParallel parallel(*model, group);
}

// The last rank issues a sum of another shape than the others, or two collectives in another order.
void diverge(const GroupPtr& group, const std::string& kind, bool is_last) {
  std::vector<Tensor> summed{at::ones({kind == "shape" && is_last ? 6 : 4})}, sent{at::ones({4})};
  const auto sum = [&] { wait_for(group, group->allreduce(summed), "sum"); };
  const auto copy = [&] { wait_for(group, group->broadcast(sent), "copy"); };
  if (kind == "order" && is_last) {
    sum();
    copy();
  } else {
    if (kind == "order") copy();
    sum();
  }
}

// The last rank does something else in the third backward; with "stop_first", the first rank does. With a
// third argument, gradients are split.
void fault(char** arguments) {
  const std::string kind = arguments[0];
  const GroupPtr group = connect(argument(arguments, 1, 3000));
  Exact model(0);
  const bool splits = argument(arguments, 2, 0) == 1;
  std::optional<DataParallel> parallel;
  shoestring::optim::SGD optimizer(model->parameters(), shoestring::optim::SGDOptions(0.125));
  using shoestring::distributed::ShardOptions;
  if (splits) {
    shoestring::distributed::shard(optimizer, group,
                                   ShardOptions().gradients(true).find_unused(kind == "found"));
  } else {
    parallel.emplace(*model, group, DataParallelOptions().find_unused(kind == "found"));
  }
  for (int64_t step = 0; step < 4; ++step) {
    const bool now = step == 2 && group->getRank() == group->getSize() - 1;
    if (now && kind == "kill") std::raise(SIGKILL);
    if (now && kind == "stop") std::raise(SIGSTOP);
    if (step == 2 && kind == "stop_first" && group->getRank() == 0) std::raise(SIGSTOP);
    if (step == 2 && (kind == "shape" || kind == "order"))
      diverge(group, kind, group->getRank() == group->getSize() - 1);
    if (step == 2 && kind == "thawed") model->unused.set_requires_grad(true);
    if (now && kind == "throw") throw std::runtime_error("the loss is not finite");
    const bool partly = step == 2 && (kind == "unused" || kind == "found");
    Tensor x = inputs(step, group->getRank(), 0);
    const Tensor loss = partly ? x.matmul(model->first).sum() : model->forward(x).sum();
    splits ? loss.backward() : parallel->backward(loss);
    if (splits) optimizer.step();
  }
}

void missing(char**) { connect(2000); }

void backend(char** arguments) {
  using shoestring::distributed::ProcessGroupOptions;
  shoestring::distributed::init_process_group(ProcessGroupOptions().backend(arguments[0]));
}

}  // namespace

int main(int count, char** arguments) {
  at::set_num_threads(1);
  const std::map<std::string, std::function<void(char**)>> tests{
      {"collectives", collectives},
      {"data_parallel", data_parallel},
      {"checkpointed", checkpointed},
      {"data_parallel_threads", data_parallel_threads},
      {"train", train_processes},
      {"compress_refuses", compress_refuses},
      {"tokens", tokens},
      {"other_model", other_model},
      {"fault", fault},
      {"missing", missing},
      {"backend", backend},
      {"other_device", other_device},
      {"zero", zero},
      {"split_gradients", split_gradients},
      {"zero_files", zero_files},
      {"zero_refuses", zero_refuses},
      {"running_statistics", running_statistics},
      {"time", time_steps},
      {"diloco", diloco},
      {"diloco_survivors", diloco_survivors},
      {"diloco_join", diloco_join},
      {"diloco_refuses", diloco_refuses},
      {"diloco_threads", diloco_threads},
      {"fully_shard", fully_shard},
      {"fully_shard_adapters", fully_shard_adapters},
      {"fully_shard_qlora", fully_shard_qlora},
      {"fully_shard_tied", fully_shard_tied},
      {"fully_shard_compressed", fully_shard_compressed},
      {"fully_shard_files", fully_shard_files},
      {"fully_shard_low_rank", fully_shard_low_rank},
      {"fully_shard_refuses", fully_shard_refuses},
      {"fully_shard_threads", fully_shard_threads}};
  try {
    tests.at(count > 1 ? arguments[1] : "")(arguments + 2);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
  if (failures == 0) std::puts("passed");
  return failures == 0 ? 0 : 1;
}
