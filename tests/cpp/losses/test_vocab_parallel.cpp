// Compares the vocabulary-parallel loss with linear_cross_entropy over all classes. The loss of each shard of
// the classes is computed in a thread of its own, which stands for a process.

#include <ATen/ATen.h>
#include <shoestring/losses/vocab_parallel.h>
#include <shoestring/ops.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "catch.h"
#include "relative_error.h"

using at::Tensor;
using shoestring::LinearCrossEntropyOptions;
using shoestring::LinearCrossEntropyShardOptions;
using shoestring::Reduce;
using shoestring::VocabParallelOptions;

namespace {

// the classes are divided into two shards, of 25 and 36 classes
constexpr int64_t kTokens = 13, kFeatures = 24, kVocab = 61, kFirst = 25;

// An all-reduce between two threads: each thread waits for the other thread's tensor. Outside the all-reduce,
// only the thread that holds `turn` runs, because the emulator runs one kernel at a time.
class Meeting {
 public:
  std::unique_lock<std::mutex> begin_turn() { return std::unique_lock(mutex_); }
  Tensor all_reduce(std::unique_lock<std::mutex>& turn, int rank, const Tensor& x, Reduce reduce) {
    const int round = round_[rank]++;
    given_[round].push_back(x.clone());
    arrived_.notify_all();
    const bool both =
        arrived_.wait_for(turn, std::chrono::seconds(60), [&] { return given_[round].size() == 2; });
    TORCH_CHECK(both, "the other process has gone");
    const Tensor &a = given_[round][0], &b = given_[round][1];
    return reduce == Reduce::kSum ? a + b : at::maximum(a, b);
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<int, std::vector<Tensor>> given_;
  int round_[2] = {0, 0};
};

struct Leaves {
  explicit Leaves(at::ScalarType dtype) {
    at::manual_seed(5);
    const auto leaf = [&](at::IntArrayRef shape) { return at::randn(shape, at::kDouble).to(dtype); };
    hidden = leaf({kTokens, kFeatures}), weight = leaf({kVocab, kFeatures}) * 0.5, bias = leaf({kVocab});
    lora_A = leaf({4, kFeatures}), lora_B = leaf({kVocab, 4});
    target = at::randint(kVocab, {kTokens}, at::kLong);
    target[3] = -100;
  }
  // Returns the inputs for a shard with the classes [first, first + count). All of them require gradients.
  Leaves shard(int64_t first, int64_t count) const {
    Leaves part = *this;
    for (Tensor* t : {&part.weight, &part.bias, &part.lora_B}) *t = t->narrow(0, first, count);
    for (Tensor* t : part.all()) *t = t->clone().requires_grad_();
    return part;
  }
  std::vector<Tensor*> all() { return {&hidden, &weight, &bias, &lora_A, &lora_B}; }
  Tensor lora_hidden() const { return 0.5 * hidden.matmul(lora_A.t()); }
  torch::autograd::variable_list gradients(const Tensor& loss) {
    std::vector<Tensor> leaves;
    for (Tensor* t : all()) leaves.push_back(*t);
    const Tensor upstream = at::linspace(0.5, 2, loss.numel(), loss.options()).view_as(loss);
    return torch::autograd::grad({loss}, leaves, {upstream});
  }
  Tensor hidden, weight, bias, lora_A, lora_B, target;
};

}  // namespace

TEST_CASE("linear_cross_entropy over processes that share the classes", "[vocab_parallel]") {
  const auto dtype = GENERATE(at::kDouble, at::kFloat);
  const std::string reduction = GENERATE("mean", "sum", "none");
  const Leaves leaves(dtype);
  const auto all = VocabParallelOptions().reduction(reduction).z_loss(1e-2).shift(true);
  const Tensor weights = at::linspace(0.1, 1, kTokens, leaves.hidden.options());

  Leaves whole = leaves.shard(0, kVocab);
  auto options =
      LinearCrossEntropyOptions().reduction(reduction).z_loss(1e-2).shift(true).softcap(4).logit_scale(0.7);
  options.lora_hidden(whole.lora_hidden()).lora_B(whole.lora_B).token_weights(weights);
  const Tensor expected =
      shoestring::linear_cross_entropy(whole.hidden, whole.weight, whole.target, whole.bias, options);
  const auto expected_gradients = whole.gradients(expected);

  Meeting meeting;
  const int64_t first[] = {0, kFirst, kVocab};
  Tensor loss[2];
  torch::autograd::variable_list gradients[2];
  std::exception_ptr failed[2];
  std::vector<std::thread> processes;
  for (int rank = 0; rank < 2; ++rank) {
    processes.emplace_back([&, rank] {
      auto turn = meeting.begin_turn();
      try {
        Leaves part = leaves.shard(first[rank], first[rank + 1] - first[rank]);
        auto shard = LinearCrossEntropyShardOptions().softcap(4).logit_scale(0.7);
        shard.lora_hidden(part.lora_hidden()).lora_B(part.lora_B);
        auto weighted = all;
        weighted.token_weights(weights);
        const auto all_reduce = [&, rank](Tensor x, Reduce reduce) {
          return meeting.all_reduce(turn, rank, x, reduce);
        };
        loss[rank] = shoestring::vocab_parallel_linear_cross_entropy(
            part.hidden, part.weight, part.target, first[rank], all_reduce, part.bias, shard, weighted);
        gradients[rank] = part.gradients(loss[rank]);
      } catch (...) {
        failed[rank] = std::current_exception();
      }
    });
  }
  for (auto& process : processes) process.join();
  const double bound = dtype == at::kDouble ? 1e-12 : 2e-6;
  for (int rank = 0; rank < 2; ++rank) {
    if (failed[rank]) std::rethrow_exception(failed[rank]);
    CHECK(relative_error(loss[rank], expected) < bound);
    const int64_t count = first[rank + 1] - first[rank];
    for (int i = 0; i < 5; ++i) {
      CAPTURE(rank, i);
      // hidden and lora_A are not sharded; every process has all of them
      const bool shared = i == 0 || i == 3;
      const Tensor mine =
          shared ? expected_gradients[i] : expected_gradients[i].narrow(0, first[rank], count);
      CHECK(relative_error(gradients[rank][i], mine) < bound);
    }
  }
  CHECK(at::equal(loss[0], loss[1]));
}

TEST_CASE("linear_cross_entropy_shard: the parts make the whole", "[vocab_parallel]") {
  const Leaves leaves(at::kDouble);
  Leaves whole = leaves.shard(0, kVocab);
  const auto stats = shoestring::linear_cross_entropy_with_stats(
      whole.hidden, whole.weight, whole.target, whole.bias, LinearCrossEntropyOptions().reduction("none"));
  const Tensor counted = whole.target.ne(-100);
  Tensor total = at::full({kTokens}, -INFINITY, at::kDouble), at_target = at::zeros({kTokens}, at::kDouble);
  for (const auto& [first, count] : {std::pair{0, 20}, std::pair{20, 20}, std::pair{40, 21}}) {
    const auto part =
        shoestring::linear_cross_entropy_shard(whole.hidden, whole.weight.narrow(0, first, count),
                                               whole.target, first, whole.bias.narrow(0, first, count));
    total = at::logaddexp(total, part.lse);
    at_target = at_target + part.target_logit;
  }
  const Tensor loss = (total - at_target).masked_fill(counted.logical_not(), 0);
  CHECK(relative_error(loss, stats.token_loss) < 1e-13);
  const auto gradient = [&](const Tensor& of) {
    return torch::autograd::grad({of.sum()}, {whole.hidden, whole.weight, whole.bias});
  };
  const auto ours = gradient(loss), expected = gradient(stats.token_loss);
  for (int i = 0; i < 3; ++i) CHECK(relative_error(ours[i], expected[i]) < 1e-12);
}

TEST_CASE("vocab_parallel_linear_cross_entropy refuses a target that is nobody's", "[vocab_parallel]") {
  const Leaves leaves(at::kFloat);
  const auto alone = [](Tensor x, Reduce) { return x; };
  const auto run = [&](int64_t first_class, const VocabParallelOptions& options) {
    return shoestring::vocab_parallel_linear_cross_entropy(leaves.hidden, leaves.weight, leaves.target,
                                                           first_class, alone, {}, {}, options);
  };
  CHECK_NOTHROW(run(0, {}));
  CHECK_THROWS_WITH(run(30, {}), Catch::Contains("target: expected each class to be one process's"));
  CHECK_THROWS_WITH(run(0, VocabParallelOptions().reduction("all")),
                    Catch::Contains("reduction: expected 'mean', 'sum' or 'none'"));
}
