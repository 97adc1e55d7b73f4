#pragma once

// Training in several processes, over PyTorch's process groups (c10d). torchrun starts the processes, of C++
// programs as of Python programs. The library is libshoestring_distributed.so: link shoestring::distributed.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <shoestring/core/export.h>
#include <shoestring/files/safetensors.h>
#include <shoestring/optim/base.h>

namespace shoestring::distributed {

namespace detail {  // internal namespace, not part of the API
class Averaging;
}  // namespace detail

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

struct SHOESTRING_API ProcessGroupOptions {
  /// "gloo", for tensors of the CPU, or "nccl", for those of GPUs. NCCL needs a build with CUDA kernels that
  /// found nccl.h, and shoestring::shoestring in the program. Each process selects its GPU before, by
  /// c10::cuda::set_device().
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

/// Returns a group of some ranks of a group, or no group on the other ranks. All ranks of `group` must call
/// it, with the same ranks.
SHOESTRING_API GroupPtr new_group(const GroupPtr& group, const std::vector<int64_t>& ranks,
                                  std::chrono::milliseconds timeout = std::chrono::minutes(30));

/// Returns the ranks of a group that live after a collective has failed, on all of them the same. Ranks that
/// do not answer within two seconds are left out. Give them to new_group(), and go on with that group. Throws
/// c10::Error if no collective of the group has failed, if the process that holds the store has ended, or if
/// the others have left this rank out.
SHOESTRING_API std::vector<int64_t> survivors(const GroupPtr& group);

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
  /// "none", or "8bit", "4bit" or "1bit": the bits in which gradients are sent, for links that are slower
  /// than backward. A parameter takes 2.03, 1.06 or 0.28 bytes of the link instead of 8, times (ranks - 1) /
  /// ranks. Each rank keeps what its codes leave out, 4 bytes a parameter and 4 / ranks more, and adds it to
  /// the gradients of the next step. All ranks get the same bits. Gradients are fp32, bf16 or fp16.
  TORCH_ARG(std::string, compress) = "none";
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
/// on the rank, and parallel.backward() of the last one. Calls of several threads wait for each other.
class SHOESTRING_API DataParallel {
 public:
  /// Calls broadcast_module(). Parameters that are frozen now are left out, also later.
  DataParallel(const torch::nn::Module& module, GroupPtr group, const DataParallelOptions& options = {});
  ~DataParallel();
  DataParallel(DataParallel&&) noexcept;
  DataParallel& operator=(DataParallel&&) noexcept;

  /// Computes the gradients of a loss and averages them over the ranks, with those that have been
  /// accumulated. Then all ranks take the running statistics of rank 0's normalisation layers: the buffers of
  /// modules that have a buffer "running_mean". All ranks must call it equally often.
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
  /// "none", or "8bit", "4bit" or "1bit": the bits in which split gradients are sent; see
  /// DataParallelOptions. They travel once: a parameter takes 1.02, 0.53 or 0.14 bytes of the link. Each rank
  /// keeps 4 bytes a parameter, for all parameters.
  TORCH_ARG(std::string, compress) = "none";
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

struct SHOESTRING_API FullyShardOptions {
  /// A group of the ranks that have the same part of the parameters, one in each group that splits them
  /// (hybrid sharding). Gradients are averaged over it, too.
  TORCH_ARG(GroupPtr, replicas) = {};
  /// Whether a backward may leave parameters without a gradient. Zeros are sent for them, and for all
  /// parameters of a block that it does not use.
  TORCH_ARG(bool, find_unused) = false;
  /// The place of a rank's parts: "none", on the device of the parameters; "cpu", in pinned host memory,
  /// together with their gradients, so that the optimizer steps them on the CPU; or "nvme:DIR", in a file in
  /// the folder DIR, whose pages the kernel reads when they are used and takes back when memory is short.
  /// Gradients are in host memory then. "cpu" needs parameters on a GPU.
  TORCH_ARG(std::string, offload) = "none";
  /// "none", or "8bit", "4bit" or "1bit": the bits in which gradients are sent; see DataParallelOptions. They
  /// travel once: a parameter takes 1.02, 0.53 or 0.14 bytes of the link, and each rank keeps 4 bytes for
  /// each parameter of the model. With `replicas`, only the average over them is compressed: a parameter of
  /// this rank's part takes 2.03, 1.06 or 0.28 bytes times (replicas - 1) / replicas, and the rank keeps 4
  /// bytes and 4 / replicas for it. Checkpoints have no residuals.
  TORCH_ARG(std::string, compress) = "none";
};

/// Splits the parameters, gradients and optimizer state of a model over the ranks (ZeRO-3), as fully_shard
/// does in Python. The parameters of a block are gathered while the block before it runs, and their gradients
/// are sent to the ranks that step them while backward goes on. Two blocks have whole parameters at a time.
/// Frozen tensors, such as quantised weights, are split by bytes. Example:
///
///     FullyShard sharded(group);
///     for (auto& block : blocks) sharded.add(block->parameters());
///     optim::AdamW optimizer(sharded.parameters(), optim::AdamWOptions(1e-3));
///     ...
///     for (size_t i = 0; i < blocks.size(); ++i)
///       x = sharded.run(i, x, [&](const at::Tensor& y) { return blocks[i]->forward(y); });
///     loss_of(x).backward();
///     optimizer.step();
///     optimizer.zero_grad();
///
/// Each rank holds 1 / ranks of a block, to within 256 elements of each dtype and parameter. Steps have the
/// bits of one process, with 8-bit state, too. Optimizers of this library clip by the norm over all ranks
/// (set_max_grad_norm), and may step each part as soon as its gradient arrives (set_step_in_backward).
/// Stochastic rounding, of weights and of bf16 state, draws other numbers than one process does.
///
/// One thread runs forward and backward, because all ranks must gather blocks in one order. Calls of the
/// other functions may come from other threads, and wait for collectives under way.
///
/// Source: ZeRO, arXiv 1910.02054.
class SHOESTRING_API FullyShard {
 public:
  explicit FullyShard(GroupPtr group, const FullyShardOptions& options = {});
  ~FullyShard();
  FullyShard(const FullyShard&) = delete;
  FullyShard& operator=(const FullyShard&) = delete;

  /// Adds the next block and returns its index. Copies the tensors of rank 0 to all ranks, keeps this rank's
  /// part, and frees the others. Tensors that require gradients now are trained. `keep`: whether the block
  /// stays whole from its forward to the end of backward, for blocks that run several times in a forward,
  /// such as an embedding whose weight is also that of the output layer. All ranks must call it. Throws
  /// c10::Error on all ranks if the tensors differ in number, shape or dtype.
  int64_t add(const std::vector<at::Tensor>& tensors, bool keep = false);

  /// Returns forward(x), with whole parameters of the block. Blocks run in the order of their indices, on all
  /// ranks alike. A block may run again in backward, within a checkpoint.
  at::Tensor run(int64_t block, const at::Tensor& x,
                 const std::function<at::Tensor(const at::Tensor&)>& forward);

  /// Returns this rank's parts of all trained parameters, for an optimizer: tensors of one dimension, which
  /// may be empty. Backward sets their gradients.
  std::vector<at::Tensor> parameters() const;
  /// Returns this rank's part of a trained parameter, for parameter groups.
  at::Tensor shard(const at::Tensor& parameter) const;

  /// Backward keeps the gradients on this rank as long as the returned object lives, and sends their sum when
  /// it is gone. Hold it during all micro-batches but the last. Without it each backward sends its gradients,
  /// which takes less memory.
  [[nodiscard]] std::shared_ptr<void> accumulate();

  /// Clips the norm over all ranks, for optimizers of LibTorch. Returns the norm before.
  at::Tensor clip_grad_norm_(double max_norm);

  /// Calls `function` with whole parameters of all blocks, for example to write them to a file.
  /// (save_training does not need it.) `changed`: whether the function changes parameters, alike on all
  /// ranks. All ranks must call it.
  void present(const std::function<void()>& function, bool changed = false);

  /// Gives all blocks whole parameters for good. The object has no blocks after that. All ranks must call it.
  void restore();

  /// Returns bytes: "own" of this rank's parts of parameters; "gathered" in memory for whole parameters and
  /// gradients at present; "received" of parameters and "sent" of gradients so far; "residuals" of what the
  /// codes of compressed gradients have left out.
  std::map<std::string, int64_t> statistics() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

struct SHOESTRING_API DiLoCoOptions {
  /// Steps from one average of a parameter to the next.
  TORCH_ARG(int64_t, every) = 500;
  /// The rate of the outer steps.
  TORCH_ARG(double, lr) = 0.7;
  /// The momentum of the outer steps; 0 for none.
  TORCH_ARG(double, momentum) = 0.9;
  /// "none", or "8bit", "4bit" or "1bit": the bits in which differences are sent, with error feedback. See
  /// DataParallelOptions.
  TORCH_ARG(std::string, compress) = "none";
  /// The parameters are dealt out to so many fragments of about the same size, whose averages are spread
  /// evenly over the period. So the most bytes of a step are fewer by this factor. A parameter is never
  /// divided.
  TORCH_ARG(int64_t, fragments) = 1;
  /// Steps from the begin of an average to the outer step, while which training goes on; 0 waits at once.
  TORCH_ARG(int64_t, overlap) = 0;
  /// The part of a process's own weights in its weights after an overlapped average; the rest is the averaged
  /// weights. The default is 0.5, and without overlap 0.
  TORCH_ARG(std::optional<double>, alpha) = std::nullopt;
  /// Differences are sent in buckets of about this size in fp32.
  TORCH_ARG(int64_t, bucket_bytes) = 32 << 20;
};

/// Averages the weights of processes every few hundred steps, with an outer optimizer. Each process trains by
/// itself. The averages are steps of SGD with Nesterov's momentum in the direction in which the processes
/// have gone, on average, since the last one. All processes then have the same averaged weights, bit for bit;
/// the state of their optimizers stays their own. Example:
///
///     optim::AdamW optimizer(model->parameters(), optim::AdamWOptions(1e-3));
///     DiLoCo diloco(optimizer, group, DiLoCoOptions().every(500).compress("4bit").fragments(8).overlap(5));
///     for (...) {
///       loss_of(model).backward();
///       optimizer.step();
///       optimizer.zero_grad();
///       diloco.step();
///     }
///
/// A process keeps 8 bytes a parameter (the averaged weights and the outer momentum, fp32), and with
/// `compress` 4
/// + 4 / ranks more. An average takes 4 bytes for each parameter of a fragment, until its outer step.
///
/// Processes come and go: if a process ends, the next average throws c10::DistBackendError, which names it,
/// and nothing has changed. The others make a group of survivors() and call regroup(). A process that joins
/// makes its object over the new group while the others call regroup().
///
/// Thread-safe: each function, steps() and statistics() too, waits until no other thread is in one. So it
/// waits for an average that another thread takes, until all ranks have come or the group's timeout is over.
///
/// Sources: DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512.
class SHOESTRING_API DiLoCo {
 public:
  /// Averages parameters in fp32, bf16, fp16 or fp64. The weights of rank 0 go to all ranks; if some ranks of
  /// the group call regroup(), theirs do. All ranks must call it. Throws c10::Error on all ranks if
  /// parameters or options differ, and if an option is out of range.
  DiLoCo(std::vector<at::Tensor> parameters, GroupPtr group, const DiLoCoOptions& options = {});
  /// Averages the parameters of an optimizer. Throws c10::Error if the optimizer keeps a second copy of the
  /// weights: ScheduleFreeAdamW, and the weight rounding "remainder".
  DiLoCo(const torch::optim::Optimizer& optimizer, GroupPtr group, const DiLoCoOptions& options = {});
  ~DiLoCo();
  DiLoCo(DiLoCo&&) noexcept;
  DiLoCo& operator=(DiLoCo&&) noexcept;

  /// Counts a training step, and begins and ends the averages that are due. Returns whether weights have
  /// changed. Call it on all ranks after each step, also if a guard or GradScaler has skipped the step.
  /// Throws c10::DistBackendError if a rank has failed, with the weights and the averaged weights as before.
  bool step();
  /// Averages all weights now. They are equal on all ranks then. All ranks must call it.
  void average();

  /// Goes on with other processes. All ranks of `group` must call it, or construct an object. Fragments of
  /// which another rank has a newer average come from there, as do the steps. Averages under way and what the
  /// codes of `compress` have left out are dropped; weights keep the progress of this process.
  void regroup(GroupPtr group);

  /// Returns the number of calls of step().
  int64_t steps() const;

  /// Returns the state: "steps", "begun" (the step at which the average of each fragment began that is under
  /// way, or -1), and for each bucket "anchor.<index>" (the averaged weights), "momentum.<index>" and, under
  /// way, "mean.<index>". What the codes of `compress` have left out is no part of it. With overlap, all
  /// ranks must call it. The tensors share the memory of the object.
  TensorDict state() const;
  /// Restores a state of state(), of any number of ranks. The weights are not loaded: they are those of the
  /// model. If the state does not fit, throws c10::Error and changes nothing.
  void load_state(const TensorDict& state);

  /// Returns bytes: "sent" by this rank so far, and "residuals" that `compress` keeps.
  std::map<std::string, int64_t> statistics() const;

 protected:
  DiLoCo(const char* name, std::vector<at::Tensor> parameters, GroupPtr group, const DiLoCoOptions& options);

 private:
  std::unique_ptr<detail::Averaging> averaging_;
};

struct SHOESTRING_API LocalSGDOptions {
  /// See DiLoCoOptions.
  TORCH_ARG(int64_t, every) = 8;
  TORCH_ARG(std::string, compress) = "none";
  TORCH_ARG(int64_t, fragments) = 1;
  TORCH_ARG(int64_t, overlap) = 0;
  TORCH_ARG(std::optional<double>, alpha) = std::nullopt;
  TORCH_ARG(int64_t, bucket_bytes) = 32 << 20;
};

/// Averages the weights of processes every few steps: DiLoCo without an outer optimizer. It keeps 4 bytes a
/// parameter.
///
/// Source: Local SGD, arXiv 1805.09767.
class SHOESTRING_API LocalSGD : public DiLoCo {
 public:
  LocalSGD(std::vector<at::Tensor> parameters, GroupPtr group, const LocalSGDOptions& options = {});
  LocalSGD(const torch::optim::Optimizer& optimizer, GroupPtr group, const LocalSGDOptions& options = {});
};

}  // namespace shoestring::distributed
