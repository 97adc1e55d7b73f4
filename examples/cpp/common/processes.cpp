#include "processes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <shoestring/distributed/distributed.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>

#include "input_error.h"

namespace distributed = shoestring::distributed;
using at::Tensor;
using shoestring::optim::LowMemoryOptimizer;

namespace {

constexpr std::chrono::minutes kTimeout(10);

int64_t world_size() {
  const char* variable = std::getenv("WORLD_SIZE");
  const std::string text = variable == nullptr ? "1" : variable;
  int64_t size = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
  if (error != std::errc() || end != text.data() + text.size() || size < 1) {
    throw InputError("WORLD_SIZE: expected a number in the environment, as torchrun sets it, got " + text);
  }
  return size;
}

distributed::GroupPtr connect(const std::string& strategy) {
  try {
    return distributed::init_process_group(distributed::ProcessGroupOptions().timeout(kTimeout));
  } catch (const c10::Error& error) {
    throw InputError("--parallel " + strategy +
                     ": the processes do not connect: " + error.what_without_backtrace());
  }
}

}  // namespace

struct Processes::Impl {
  Impl(const std::string& strategy, const std::string& bits)
      : splits_steps(strategy == "zero1" || strategy == "zero2"), splits_gradients(strategy == "zero2"),
        compress(bits), group(connect(strategy)) {
    if (strategy == "zero3") sharded.emplace(group, distributed::FullyShardOptions().compress(compress));
  }

  bool splits_steps, splits_gradients;
  std::string compress;
  distributed::GroupPtr group;
  std::optional<distributed::DataParallel> parallel;  // with ddp and zero1
  std::optional<distributed::FullyShard> sharded;     // with zero3
};

Processes::Processes() {
  const int64_t count = world_size();
  if (count == 1) return;
  throw InputError("WORLD_SIZE: expected 1, since this program trains in one process, got " +
                   std::to_string(count) + "; start it without torchrun");
}

Processes::Processes(const LoopOptions& options, at::Device device) {
  const int64_t count = world_size();
  const std::string processes = std::to_string(count) + " processes";
  if (count > 1 && options.parallel == "none") {
    throw InputError("--parallel: expected ddp, zero1, zero2 or zero3 in a run of " + processes +
                     ", got none");
  }
  if (std::getenv("WORLD_SIZE") == nullptr && options.parallel != "none") {
    throw InputError("--parallel " + options.parallel +
                     ": expected processes that torchrun has started, got one process without it; start the "
                     "program with torchrun --nproc-per-node N --no-python, or leave --parallel out");
  }
  if (count == 1) return;
  if (options.batch_size % count != 0) {
    throw InputError("--batch-size: expected a multiple of the " + processes +
                     ", which share the rows of a micro-batch, got " + std::to_string(options.batch_size));
  }
  if (!device.is_cpu()) {
    throw InputError("--parallel " + options.parallel +
                     ": expected the CPU, on which C++ programs have process groups, got " + device.str() +
                     "; take --device cpu");
  }
  impl_ = std::make_unique<Impl>(options.parallel, options.compress);
  if (!is_first() && std::freopen("/dev/null", "w", stdout) == nullptr)
    throw InputError("/dev/null: cannot open");
}

Processes::~Processes() = default;

int64_t Processes::count() const { return impl_ ? impl_->group->getSize() : 1; }

bool Processes::is_first() const { return !impl_ || impl_->group->getRank() == 0; }

std::vector<int64_t> Processes::share(const std::vector<int64_t>& all) const {
  if (!impl_) return all;
  const auto size = static_cast<int64_t>(all.size());
  const int64_t rank = impl_->group->getRank();
  return {all.begin() + size * rank / count(), all.begin() + size * (rank + 1) / count()};
}

Tensor Processes::mean(const Tensor& number) const {
  return impl_ ? distributed::mean_over_ranks(impl_->group, number) : number;
}

std::vector<int64_t> Processes::of_all(int64_t number) const {
  if (!impl_) return {number};
  Tensor own = at::full({1}, number, at::kLong), all = at::empty({count()}, at::kLong);
  distributed::wait_for(impl_->group, impl_->group->_allgather_base(all, own), "numbers of the processes");
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel()};
}

bool Processes::splits_gradients() const { return impl_ && impl_->splits_gradients; }

bool Processes::splits_weights() const { return impl_ && impl_->sharded; }

void Processes::add_block(const std::vector<Tensor>& parameters, bool keep) {
  if (splits_weights()) impl_->sharded->add(parameters, keep);
}

Tensor Processes::run(int64_t block, const Tensor& x, const shoestring::BlockFunction& forward) const {
  return splits_weights() ? impl_->sharded->run(block, x, forward) : forward(x);
}

Tensor Processes::part(const Tensor& parameter) const {
  return splits_weights() ? impl_->sharded->shard(parameter) : parameter;
}

void Processes::begin(const torch::nn::Module& model,
                      const std::vector<torch::optim::Optimizer*>& optimizers) {
  if (!impl_ || impl_->sharded) return;
  if (impl_->splits_gradients) {
    distributed::broadcast_module(model, impl_->group);
  } else {
    impl_->parallel.emplace(
        model, impl_->group,
        distributed::DataParallelOptions().gradient_as_bucket_view(true).compress(impl_->compress));
  }
  if (!impl_->splits_steps) return;
  auto options = distributed::ShardOptions().gradients(impl_->splits_gradients);
  if (impl_->splits_gradients) options.compress(impl_->compress);
  for (torch::optim::Optimizer* optimizer : optimizers)
    distributed::shard(dynamic_cast<LowMemoryOptimizer&>(*optimizer), impl_->group, options);
}

void Processes::backward(const Tensor& loss, bool is_last) const {
  is_last && impl_ && impl_->parallel ? impl_->parallel->backward(loss) : loss.backward();
}

Tensor Processes::clip_grad_norm(double limit) const {
  return impl_->sharded->clip_grad_norm_(limit > 0 ? limit : std::numeric_limits<double>::infinity());
}

void Processes::save(const std::function<void()>& function) const {
  if (is_first() || impl_->splits_steps || impl_->sharded) function();
}

void Processes::present(const std::function<void()>& function) const {
  const auto call = [&] {
    if (is_first()) function();
  };
  splits_weights() ? impl_->sharded->present(call) : call();
}
