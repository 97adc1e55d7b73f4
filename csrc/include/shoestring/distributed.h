#pragma once

// Training in several processes, over PyTorch's process groups (c10d). torchrun starts the processes, of C++
// programs as of Python programs. The library is libshoestring_distributed.so: link shoestring::distributed.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <shoestring/export.h>
#include <shoestring/optim/base.h>

namespace shoestring::distributed {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

struct SHOESTRING_API ProcessGroupOptions {
  /// "gloo".
  TORCH_ARG(std::string, backend) = "gloo";
  /// How long a rank waits in a collective for the others.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(30);
  /// Number of this process, from 0. The default is the environment variable RANK.
  TORCH_ARG(std::optional<int64_t>, rank) = std::nullopt;
  /// Number of processes. The default is the environment variable WORLD_SIZE.
  TORCH_ARG(std::optional<int64_t>, world_size) = std::nullopt;
  /// Name or address of the machine of rank 0. The default is the environment variable MASTER_ADDR.
  TORCH_ARG(std::optional<std::string>, address) = std::nullopt;
  /// A free port of that machine. The default is the environment variable MASTER_PORT.
  TORCH_ARG(std::optional<int64_t>, port) = std::nullopt;
};

/// Connects this process to the others and returns the group of all processes. torchrun sets the variables
/// that the options read. A group of one process works as well. SIGPIPE is ignored from then on, unless the
/// program handles it, since it would end the process when another one ends. Throws c10::Error if a variable
/// is missing or the other processes do not come within the timeout.
SHOESTRING_API GroupPtr init_process_group(const ProcessGroupOptions& options = {});

/// Waits for a collective. An error (c10::DistBackendError) names this rank, `what`, the collective, and the
/// ranks that have ended or are stopped: those that do not answer within two seconds. If ranks have issued
/// different collectives, the error says at which collective each rank is. Only ranks of groups of
/// init_process_group() answer. Collectives of these groups raise such errors without this function, too.
SHOESTRING_API void wait_for(const GroupPtr& group, const c10::intrusive_ptr<c10d::Work>& work,
                             const std::string& what);

/// Returns the mean of a tensor over the ranks. Divide the sum of a rank's token losses by the mean number of
/// tokens of a rank; the gradients that DataParallel averages are then those of the mean over all tokens:
///
///     const Tensor tokens = mean_over_ranks(group, (target != -100).sum().to(at::kDouble));
///     parallel.backward(summed_loss / tokens);
SHOESTRING_API at::Tensor mean_over_ranks(const GroupPtr& group, const at::Tensor& tensor);

struct SHOESTRING_API DataParallelOptions {
  /// Gradients are reduced in buckets of about this size, while backward computes the others.
  TORCH_ARG(int64_t, bucket_bytes) = 25 << 20;
  /// Whether backward may leave parameters without a gradient. Each backward then walks the graph of the
  /// loss, and ranks may use different parameters.
  TORCH_ARG(bool, find_unused) = false;
  /// Whether gradients share the memory of the buckets, which saves as many bytes as the gradients have.
  /// zero_grad() of LibTorch's optimizers refuses such gradients; that of our optimizers and of modules
  /// works.
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
};

/// Copies the parameters and buffers of rank 0 to all ranks. Throws c10::Error on all ranks if parameters
/// differ in number, name, shape or dtype, and names the first that differs.
SHOESTRING_API void broadcast_module(const torch::nn::Module& module, const GroupPtr& group);

/// Data parallelism: every rank has the whole model and a part of each batch, and backward averages the
/// gradients over the ranks, as DistributedDataParallel does in Python. PyTorch's c10d::Reducer does the
/// work, while backward goes on. Example:
///
///     const auto group = init_process_group();
///     DataParallel parallel(*model, group);
///     for (...) {
///       parallel.backward(loss_of(model, batch_of(group->getRank())));
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// To accumulate gradients, call backward() of each micro-batch's loss but the last, which only adds them up
/// on the rank, and parallel.backward() of the last one.
class SHOESTRING_API DataParallel {
 public:
  /// Calls broadcast_module(). Parameters that are frozen now are left out, also later.
  DataParallel(const torch::nn::Module& module, GroupPtr group, const DataParallelOptions& options = {});
  ~DataParallel();
  DataParallel(DataParallel&&) noexcept;
  DataParallel& operator=(DataParallel&&) noexcept;

  /// Computes the gradients of a loss and averages them over the ranks, with those that have been
  /// accumulated. All ranks must call it equally often.
  void backward(const at::Tensor& loss);

  const GroupPtr& group() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct SHOESTRING_API ShardOptions {
  /// Whether the gradients are split as well (ZeRO-2). Backward then sends each gradient to the rank that
  /// steps it, and frees it. DataParallel is not needed, but broadcast_module() is. grad() is not defined
  /// after backward: clip with set_max_grad_norm, and scale with shoestring::optim::GradScaler.
  TORCH_ARG(bool, gradients) = false;
  /// Split gradients are sent in buckets of about this size, while backward computes the others.
  TORCH_ARG(int64_t, bucket_bytes) = 25 << 20;
  /// Whether a backward may leave parameters without a gradient, if gradients are split. Zeros are sent for
  /// them.
  TORCH_ARG(bool, find_unused) = false;
};

/// Splits the steps of an optimizer over the ranks (ZeRO-1). Each rank keeps 1 / ranks of the optimizer's
/// state, to within one block of 256 elements (on a GPU, and in optimizers that step whole parameters: to
/// within one parameter), steps its part, and receives the other parts. Training has the bits that it has
/// without.
///
/// Without split gradients, DataParallel, or any other means, must have averaged the gradients. The optimizer
/// keeps the group. See LowMemoryOptimizer::set_shard for what it excludes. Call it before the first step:
///
///     optim::AdamW optimizer(model->parameters(), optim::AdamWOptions(1e-3));
///     shard(optimizer, group);
///
/// To accumulate split gradients without sending them, hold optimizer.accumulate() during all micro-batches
/// but the last. Without it each backward sends its gradients, which takes less memory.
SHOESTRING_API void shard(optim::LowMemoryOptimizer& optimizer, const GroupPtr& group,
                          const ShardOptions& options = {});

}  // namespace shoestring::distributed
