#pragma once

// Finds the largest batch that fits into memory, and computes what would have fitted after a failure.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <shoestring/core/export.h>
#include <shoestring/runs/training.h>

namespace shoestring {

struct SHOESTRING_API FindBatchSizeOptions {
  FindBatchSizeOptions(int64_t at_most) : at_most_(at_most) {}
  /// The largest size to try.
  TORCH_ARG(int64_t, at_most);
  /// The smallest size that is of use.
  TORCH_ARG(int64_t, at_least) = 1;
  /// Only multiples of this number are tried.
  TORCH_ARG(int64_t, multiple_of) = 1;
  /// Bytes that a step may take on a CPU above what is in use. Without it, 90 % of what the machine, or the
  /// control group of the process, has left. On a GPU, its allocator decides.
  TORCH_ARG(std::optional<int64_t>, memory);
};

/// One size that find_batch_size has looked at.
struct SHOESTRING_API BatchTrial {
  int64_t batch_size = 0;
  /// Whether two steps have succeeded.
  bool fits = false;
  /// The memory that the trial took above what was in use before. It is a prediction if the trial was not
  /// run, and 0 if it failed.
  int64_t bytes = 0;
  /// Whether the size was tried. On a CPU, sizes that cannot fit are not tried, because the system would end
  /// the process.
  bool was_run = false;
};

struct SHOESTRING_API BatchSizeSearch {
  /// The largest number of rows that fits. It has been tried.
  int64_t batch_size;
  /// All sizes that were looked at, in their order.
  std::vector<BatchTrial> trials;
};

/// Finds the largest batch size with which a training step fits into memory. `step` takes one step on a
/// number of rows; use the longest rows of the data. Sizes are doubled until one does not fit, and then
/// bisected. Each trial takes two steps, because the first one creates gradients and optimizer state.
/// Afterwards everything that `run` names is as before, bit for bit; a copy is kept in host memory meanwhile.
/// Throws c10::Error if not even `at_least` fits, with a message about what is in the way. The Python
/// counterpart is shoestring.find_batch_size. Example:
///
///     TrainingRun run{training_tensors(*model), {&optimizer}};
///     const auto found = find_batch_size([&](int64_t rows) { train_step(rows); }, run, 256);
SHOESTRING_API BatchSizeSearch find_batch_size(const std::function<void(int64_t)>& step, TrainingRun& run,
                                               const FindBatchSizeOptions& options);

struct SHOESTRING_API MemoryAdviceOptions {
  /// Number of rows of the step that failed.
  TORCH_ARG(std::optional<int64_t>, batch_size);
  /// Bytes that the step took at its peak. Without them, the peak of the allocator of a GPU.
  TORCH_ARG(std::optional<int64_t>, needed);
  /// Message of the exception, which on a GPU says how much more was asked for.
  TORCH_ARG(std::string, error) = "";
};

/// The memory that a training step needs, and what would have fitted. All sizes are in bytes.
struct SHOESTRING_API MemoryAdvice {
  int64_t total = 0;      ///< memory of the device
  int64_t weights = 0;    ///< parameters and buffers
  int64_t gradients = 0;  ///< gradients of all trainable parameters
  int64_t state = 0;      ///< state of the optimizers, or of 8-bit AdamW before a first step
  /// Everything else that the step needed, if that is known.
  std::optional<int64_t> activations{};
  /// Number of rows of the step that failed, and the number that would have fitted, if they are known.
  std::optional<int64_t> batch_size{}, fitting{};
  int64_t parameters = 0;  ///< number of trainable elements
  bool has_state = false;  ///< whether the optimizers have a state

  /// Returns the advice in sentences.
  std::string text() const;
};

/// Computes what would have fitted when a training step of a module ran out of memory.
SHOESTRING_API MemoryAdvice memory_advice(const torch::nn::Module& module,
                                          const std::vector<torch::optim::Optimizer*>& optimizers = {},
                                          const MemoryAdviceOptions& options = {});

}  // namespace shoestring
