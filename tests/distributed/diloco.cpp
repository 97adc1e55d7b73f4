// Tests of DiLoCo and LocalSGD. Python compares the weights that "diloco" prints with a reference.

#include <csignal>
#include <cstdio>
#include <functional>
#include <optional>

#include <ATen/Functions.h>
#include <torch/nn/modules/linear.h>

#include "common.h"

namespace {

using shoestring::distributed::DiLoCo;
using shoestring::distributed::DiLoCoOptions;
using shoestring::distributed::LocalSGD;
using shoestring::distributed::LocalSGDOptions;
using shoestring::distributed::new_group;
using shoestring::distributed::ProcessGroupOptions;
using shoestring::distributed::survivors;
using shoestring::distributed::wait_for;

std::vector<Tensor> parameters(int64_t rank) {
  std::vector<Tensor> params;
  for (int64_t p = 0; p < 6; ++p)
    params.push_back(at::arange(40, at::kFloat).add(p + 1000 * rank).div_(64).view({8, 5}));
  return params;
}

// Moves the weights as tests/python/diloco_reference.py does.
void train(const std::vector<Tensor>& params, int64_t step, int64_t rank) {
  for (size_t p = 0; p < params.size(); ++p) {
    const Tensor element = at::arange(params[p].numel(), at::kFloat).view_as(params[p]);
    const int64_t shift = 7 * step + 5 * rank + static_cast<int64_t>(p);
    params[p].sub_(element.mul(3).add(shift).remainder(11).sub_(4).mul_(rank + 1).div_(256));
  }
}

std::vector<Tensor> copies(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> found;
  for (const Tensor& tensor : tensors) found.push_back(tensor.detach().clone());
  return found;
}

bool equal(const std::vector<Tensor>& first, const std::vector<Tensor>& second) {
  for (size_t i = 0; i < first.size(); ++i)
    if (!first[i].equal(second[i])) return false;
  return first.size() == second.size();
}

std::vector<Tensor> averaged_weights(const DiLoCo& diloco) {
  std::vector<Tensor> found;
  for (const auto& item : diloco.state())
    if (item.key().rfind("anchor.", 0) == 0) found.push_back(item.value().clone());
  return found;
}

void expect_replicated(const GroupPtr& group, const std::vector<Tensor>& tensors, const std::string& what) {
  for (const Tensor& tensor : tensors) {
    std::vector<Tensor> input{tensor.detach().contiguous()};
    std::vector<std::vector<Tensor>> all(1);
    for (int i = 0; i < group->getSize(); ++i) all[0].push_back(at::empty_like(input[0]));
    wait_for(group, group->allgather(all, input), "all_gather");
    for (const Tensor& other : all[0]) expect(other.equal(input[0]), what);
  }
}

// The least-squares problem of the tests whose processes come and go.
Tensor loss_of(torch::nn::Linear& model, int64_t step, int64_t rank) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 * step + rank));
  const Tensor x = at::randn({16, 8}, generator);
  return (model->forward(x) - x.narrow(1, 0, 4)).square().mean();
}

void train(torch::nn::Linear& model, shoestring::optim::AdamW& optimizer, int64_t step, int64_t rank) {
  optimizer.zero_grad();
  loss_of(model, step, rank).backward();
  optimizer.step();
}

DiLoCoOptions often() { return DiLoCoOptions().every(4).fragments(2).overlap(1); }

}  // namespace

// Arguments: "diloco" or "local", every, compress, fragments, overlap, steps, and whether the state of the
// middle continues in another object (1). Prints the weights of this rank, and the bytes that it has sent.
void diloco(char** arguments) {
  const std::string kind = arguments[0], compress = arguments[2];
  const int64_t every = argument(arguments, 1, 4), fragments = argument(arguments, 3, 1);
  const int64_t overlap = argument(arguments, 4, 0), steps = argument(arguments, 5, 12);
  const bool resumes = argument(arguments, 6, 0) == 1;
  const GroupPtr group = connect();
  const int64_t rank = group->getRank();
  auto params = parameters(rank);
  const auto make = [&]() -> std::unique_ptr<DiLoCo> {
    if (kind == "local")
      return std::make_unique<LocalSGD>(params, group,
                                        LocalSGDOptions()
                                            .every(every)
                                            .compress(compress)
                                            .fragments(fragments)
                                            .overlap(overlap)
                                            .bucket_bytes(200));
    return std::make_unique<DiLoCo>(
        params, group,
        DiLoCoOptions().every(every).compress(compress).fragments(fragments).overlap(overlap).bucket_bytes(
            200));
  };
  auto own = make();
  expect(equal(params, parameters(0)), "the weights of rank 0 go to all ranks");
  for (int64_t step = 1; step <= steps; ++step) {
    train(params, step, rank);
    own->step();
    expect_replicated(group, averaged_weights(*own), "averaged weights of all ranks are equal");
    if (!resumes || step != steps / 2 + 1) continue;
    shoestring::TensorDict state;
    for (const auto& item : own->state()) state.insert(item.key(), item.value().clone());
    const auto weights = copies(params);
    own = make();
    for (size_t i = 0; i < params.size(); ++i) params[i].copy_(weights[i]);
    own->load_state(state);
  }
  expect(own->steps() == steps, "steps are counted");
  if (overlap == 0) {
    own->average();
    expect_replicated(group, params, "weights of all ranks are equal after average()");
  }
  for (const Tensor& param : params) {
    const Tensor values = param.flatten();
    for (int64_t i = 0; i < values.numel(); ++i) std::printf("%.9g ", values[i].item<double>());
  }
  std::printf("\n%ld\n", static_cast<long>(own->statistics().at("sent")));
}

// The last of three ranks is killed. The others go on without it, with nothing changed by the failure.
void diloco_survivors(char** arguments) {
  const int64_t at_step = argument(arguments, 0, 10);
  const std::string compress = arguments[1];
  GroupPtr group = connect(3000);
  const int64_t rank = group->getRank();
  torch::manual_seed(0);
  torch::nn::Linear model(8, 4);
  shoestring::optim::AdamW optimizer(model->parameters(), shoestring::optim::AdamWOptions(2e-2));
  DiLoCo own(optimizer, group, often().compress(compress));
  const auto loss = [&] { return loss_of(model, 1000, 0).item<double>(); };
  const double first = loss();
  int64_t failures_seen = 0;
  std::vector<Tensor> averaged;  // after the last step, without an average under way
  for (int64_t step = 1; step <= 60; ++step) {
    if (rank == 2 && step == at_step) std::raise(SIGKILL);
    train(model, optimizer, step, rank);
    const auto weights = copies(model->parameters());
    try {
      own.step();
      if (step % 2 == 1) averaged = averaged_weights(own);
    } catch (const c10::DistBackendError& error) {
      std::printf("%s\n", error.what_without_backtrace());
      expect(++failures_seen == 1, "one failure");
      expect(equal(weights, copies(model->parameters())), "weights do not change in a failure");
      expect(equal(averaged, averaged_weights(own)), "averaged weights do not change in a failure");
      const auto living = survivors(group);
      expect(living == std::vector<int64_t>{0, 1}, "survivors");
      group = new_group(group, living, std::chrono::seconds(20));
      own.regroup(group);
      expect_replicated(group, averaged_weights(own), "averaged weights after regroup()");
    }
  }
  expect(failures_seen == 1 && group->getSize() == 2, "the survivors go on");
  expect_replicated(group, averaged_weights(own), "averaged weights at the end");
  own.average();
  expect(loss() < first / 4, c10::str("the loss falls: ", first, " to ", loss()));
}

// Two ranks train, and a third joins them at another port. Arguments: the port.
void diloco_join(char** arguments) {
  GroupPtr group = connect();
  const bool is_new = group->getSize() == 3;
  const int64_t rank = group->getRank();
  torch::manual_seed(rank);
  torch::nn::Linear model(8, 4);
  shoestring::optim::AdamW optimizer(model->parameters(), shoestring::optim::AdamWOptions(2e-2));
  DiLoCo own(optimizer, group, often());
  const auto loss = [&] { return loss_of(model, 1000, 0).item<double>(); };
  const double first = loss();
  if (is_new) {
    expect(own.steps() == 22, "a rank that joins receives the steps");
  } else {
    for (int64_t step = 1; step <= 22; ++step) {
      train(model, optimizer, step, rank);
      own.step();
    }
    const auto weights = copies(model->parameters());
    group = shoestring::distributed::init_process_group(
        ProcessGroupOptions().rank(rank).world_size(3).port(argument(arguments, 0, 0)));
    own.regroup(group);
    expect(equal(weights, copies(model->parameters())), "weights keep their progress when a rank joins");
  }
  const auto averaged = averaged_weights(own);
  expect_replicated(group, averaged, "averaged weights after a rank has joined");
  if (is_new) {
    // The fragments are the weight and the bias.
    expect(averaged[0].equal(model->weight.detach().flatten()) && averaged[1].equal(model->bias.detach()),
           "a rank that joins begins with the averaged weights");
  }
  for (int64_t step = 23; step <= 60; ++step) {
    train(model, optimizer, step, rank);
    own.step();
  }
  own.average();
  expect_replicated(group, averaged_weights(own), "averaged weights at the end");
  expect(is_new || loss() < first / 4, "the loss falls");
}

void diloco_refuses(char**) {
  const GroupPtr group = connect();
  const int64_t rank = group->getRank();
  const auto refused = [](const std::function<void()>& function) {
    try {
      function();
      std::puts("no error");
    } catch (const c10::Error& error) {
      std::puts(error.what_without_backtrace());
    }
  };
  const std::vector<Tensor> params{at::ones({4})};
  const auto refuse = [&](const DiLoCoOptions& options) {
    refused([&] { const DiLoCo diloco(params, group, options); });
  };
  refuse(DiLoCoOptions().every(0));
  refuse(DiLoCoOptions().lr(0));
  refuse(DiLoCoOptions().momentum(1));
  refuse(DiLoCoOptions().compress("2bit"));
  refuse(DiLoCoOptions().every(4).fragments(5));
  refuse(DiLoCoOptions().every(4).overlap(4));
  refuse(DiLoCoOptions().overlap(1).alpha(1));
  refuse(DiLoCoOptions().alpha(0.5));
  refuse(DiLoCoOptions().bucket_bytes(0));
  refuse(DiLoCoOptions().every(4 + rank));
  refused([&] { const DiLoCo diloco(params, {}); });
  refused([&] { const DiLoCo diloco({at::ones({2}, at::kLong)}, group); });
  refused([&] { const DiLoCo diloco({at::ones({4 + rank})}, group); });
  namespace optim = shoestring::optim;
  refused([&] { const LocalSGD local(optim::ScheduleFreeAdamW(params), group); });
  refused([&] {
    const LocalSGD local(optim::AdamW(params, optim::AdamWOptions().weight_rounding("remainder")), group);
  });
  refused([&] { survivors(group); });
  refused([&] { survivors({}); });
  DiLoCo own(params, group);
  refused([&] { own.regroup({}); });
  LocalSGD local(params, group);
  refused([&] { local.load_state(own.state()); });
  shoestring::TensorDict state;
  for (const auto& item : own.state()) state.insert(item.key(), item.value());
  state["begun"] = at::zeros({1}, at::kLong);
  refused([&] { own.load_state(state); });
  state["begun"] = at::zeros({2}, at::kLong);
  refused([&] { own.load_state(state); });
}

// Two threads step and read. All ranks take the same averages, in whatever order their threads come.
void diloco_threads(char** arguments) {
  const int64_t overlap = argument(arguments, 0, 0);
  const GroupPtr group = connect();
  auto params = parameters(0);
  DiLoCo own(params, group, DiLoCoOptions().every(2).fragments(2).overlap(overlap).bucket_bytes(200));
  const size_t entries = own.state().size();
  constexpr int64_t kSteps = 200;
  in_two_threads([&] {
    for (int64_t step = 0; step < kSteps; ++step) {
      own.step();
      expect(own.steps() > step && own.statistics().at("sent") >= 0, "counters are whole");
      if (overlap == 0) expect(own.state().size() == entries, "the state is whole");
    }
  });
  expect(own.steps() == 2 * kSteps, c10::str("steps of both threads are counted: ", own.steps()));
  own.average();
  expect(equal(params, parameters(0)), "averages of equal weights do not change them");
  expect_replicated(group, averaged_weights(own), "averaged weights at the end");
}
