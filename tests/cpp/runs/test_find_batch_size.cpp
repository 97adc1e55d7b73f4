#include "catch.h"

#include <algorithm>
#include <new>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <shoestring/optim.h>
#include <shoestring/runs/find_batch_size.h>

using namespace shoestring;
using at::Tensor;
using Catch::Contains;

namespace {

/// A step that fails above a number of rows, as an allocator of a GPU does.
struct LimitedStep {
  explicit LimitedStep(int64_t most) : most(most) { at::manual_seed(3); }

  void operator()(int64_t rows) {
    sizes.push_back(rows);
    optimizer.zero_grad();
    model(at::randn({rows, 16})).square().mean().backward();
    if (rows > most && rows % 2 == 0) throw std::bad_alloc();
    TORCH_CHECK(rows <= most, "DefaultCPUAllocator: not enough memory");
    optimizer.step();
  }

  torch::nn::Linear model{16, 1};
  optim::AdamW optimizer{model->parameters(), optim::AdamWOptions(1e-2)};
  TrainingRun run{training_tensors(*model), {&optimizer}};
  int64_t most;
  std::vector<int64_t> sizes{};
};

std::vector<Tensor> states_of(const optim::AdamW& optimizer) {
  std::vector<Tensor> found;
  for (const Tensor& p : optimizer.param_groups()[0].params()) {
    const auto& state = *optimizer.state().at(p.unsafeGetTensorImpl());
    for (const auto& [name, tensor] : dynamic_cast<const optim::ParamState&>(state).tensors())
      found.push_back(tensor.clone());
  }
  return found;
}

}  // namespace

TEST_CASE("The largest batch size is found", "[find_batch_size]") {
  const int64_t most = GENERATE(1, 2, 7, 8, 9, 31, 64, 99, 100, 1000);
  const int64_t multiple_of = GENERATE(1, 8);
  LimitedStep step(most);
  const auto take = [&](int64_t rows) { step(rows); };
  const auto options = FindBatchSizeOptions(100).multiple_of(multiple_of);
  if (most < multiple_of) {
    CHECK_THROWS_WITH(
        find_batch_size(take, step.run, options),
        Contains("at_least: expected a size that fits, received 1, which does not. The device has"));
    return;
  }
  const auto found = find_batch_size(take, step.run, options);
  CHECK(found.batch_size == std::min<int64_t>(most, 100) / multiple_of * multiple_of);
  CHECK(found.trials.size() <= 15);
  for (const auto& trial : found.trials) {
    CHECK(trial.fits == (trial.batch_size <= most));
    CHECK(std::count(step.sizes.begin(), step.sizes.end(), trial.batch_size) == (trial.fits ? 2 : 1));
  }
}

TEST_CASE("The search for a batch size leaves everything as it was", "[find_batch_size]") {
  LimitedStep step(20);
  step(4);
  const Tensor weight = step.model->weight.detach().clone(), gradient = step.model->weight.grad().clone();
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  const auto states = states_of(step.optimizer);
  find_batch_size([&](int64_t rows) { step(rows); }, step.run, 64);
  CHECK(at::equal(step.model->weight, weight));
  CHECK(at::equal(step.model->weight.grad(), gradient));
  CHECK(at::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
  const auto after = states_of(step.optimizer);
  CHECK(std::equal(states.begin(), states.end(), after.begin(), after.end(),
                   [](const Tensor& a, const Tensor& b) { return at::equal(a, b); }));
  // Another error passes, and everything is as before then, too.
  CHECK_THROWS_WITH(find_batch_size(
                        [&](int64_t rows) {
                          step(rows);
                          TORCH_CHECK(false, "other");
                        },
                        step.run, 64),
                    Contains("other"));
  CHECK(at::equal(step.model->weight, weight));
}

TEST_CASE("The memory of a CPU limits the batch size", "[find_batch_size][resident]") {
  LimitedStep step(1 << 20);
  int64_t largest = 0;
  const auto take = [&](int64_t rows) {
    largest = std::max(largest, rows);
    const Tensor touched = at::ones({rows, 1 << 18});  // 1 MiB per row
    step.optimizer.zero_grad();
    step.model(touched.narrow(1, 0, 16)).square().mean().backward();
    step.optimizer.step();
  };
  const auto found = find_batch_size(take, step.run, FindBatchSizeOptions(1024).memory(100 << 20));
  CHECK(found.batch_size >= 80);
  CHECK(found.batch_size <= 102);
  CHECK(largest <= 128);
  CHECK(std::any_of(found.trials.begin(), found.trials.end(), [](const auto& t) { return !t.was_run; }));
}

TEST_CASE("Advice on memory is computed", "[find_batch_size]") {
  torch::nn::Sequential model(torch::nn::Linear(1000, 1000), torch::nn::Linear(1000, 1000));
  for (Tensor p : model[0]->parameters()) p.requires_grad_(false);
  torch::optim::AdamW optimizer(model[1]->parameters());
  CHECK(memory_advice(*model, {&optimizer}).text().find("as AdamW in 8 bits would have") !=
        std::string::npos);
  model->forward(at::ones({1, 1000})).sum().backward();
  optimizer.step();
  const int64_t size = 4 * 1'001'000;
  auto options = MemoryAdviceOptions().batch_size(32).needed(100'000'000);
  const auto advice = memory_advice(*model, {&optimizer}, options);
  CHECK(advice.weights == 2 * size);
  CHECK(advice.gradients == size);
  CHECK(advice.state >= 2 * size);
  CHECK(advice.state <= 2 * size + 16);
  CHECK(advice.activations == 100'000'000 - 3 * size - advice.state);
  CHECK(advice.fitting == 31);
  CHECK_THAT(advice.text(), Contains("A micro-batch of 31 rows would have fitted") &&
                                Contains("set_offload(\"cpu\") would take 7.6 MiB") &&
                                Contains("shoestring::optim with 8-bit state would save"));
  const auto asked = memory_advice(*model, {&optimizer}, options.error("Tried to allocate 1.50 GiB. GPU 0"));
  CHECK(*asked.activations == *advice.activations + (3LL << 29));
}

TEST_CASE("The search for a batch size refuses wrong options", "[find_batch_size]") {
  LimitedStep step(20);
  const auto search = [&](const FindBatchSizeOptions& options) {
    find_batch_size([&](int64_t rows) { step(rows); }, step.run, options);
  };
  CHECK_THROWS_WITH(search(0), Contains("find_batch_size: at_most: expected at least 1, received 0"));
  CHECK_THROWS_WITH(search(FindBatchSizeOptions(7).multiple_of(8)),
                    Contains("expected at least 8, received 7"));
  CHECK_THROWS_WITH(search(FindBatchSizeOptions(7).multiple_of(0)),
                    Contains("multiple_of: expected a number"));
  CHECK_THROWS_WITH(search(FindBatchSizeOptions(7).memory(0)), Contains("memory: expected none or a number"));
  CHECK(step.sizes.empty());
}
