#pragma once

// Keeps the weights of a model's blocks in host memory, or in a file, while no block needs them.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring {

struct SHOESTRING_API OffloadWeightsOptions {
  /// Device of the weights: "cpu", "cuda" or "cuda:1".
  TORCH_ARG(std::string, device) = "cpu";
  /// Folder of the file that holds the weights. "" stands for host memory, which needs a device other than
  /// the CPU.
  TORCH_ARG(std::string, folder) = "";
  /// Bytes of weights that stay on the device. The first blocks stay.
  TORCH_ARG(int64_t, keep) = 0;
};

/// Runs the blocks of a model whose weights are away from the device while no block needs them. The Python
/// counterpart is offload_weights. Example:
///
///     OffloadWeights offload(OffloadWeightsOptions().folder("."));
///     for (auto& block : blocks) offload.add(block->parameters());
///     ...
///     for (size_t i = 0; i < blocks.size(); ++i)
///       x = offload.run(i, x, [&](const at::Tensor& y) { return blocks[i]->forward(y); });
///     loss_of(x).backward();
///
/// The weights of a block arrive while the block before it runs, in forward and in backward. They leave when
/// a later block needs the room. Two blocks are on the device at a time, besides those that stay, and a third
/// one while changed weights are written. Results are bitwise the same as without offloading.
///
/// The weights of an embedding and of an output layer can be tables. embedding() reads rows of a table, and
/// linear_cross_entropy() and linear_distillation() read it about 16 MiB at a time:
///
///     offload.add_table(embedding->weight);
///     offload.add_table(head->weight);
///     ...
///     x = offload.embedding(embedding->weight, tokens);
///     ...
///     linear_cross_entropy(x, head->weight, target).backward();
///
/// A weight that is read while it is away raises c10::Error. Errors of the disk name the file and the offset;
/// the step can then be repeated.
class SHOESTRING_API OffloadWeights {
 public:
  explicit OffloadWeights(const OffloadWeightsOptions& options);
  ~OffloadWeights();
  OffloadWeights(const OffloadWeights&) = delete;
  OffloadWeights& operator=(const OffloadWeights&) = delete;

  /// Adds the next block and returns its index. Its weights leave the device. `frozen` are weights that the
  /// caller does not change. `trained` are weights that an optimizer with set_step_in_backward(true) steps
  /// within backward. `stacks` are frozen, contiguous tensors (experts, ...): on the CPU, those of experts
  /// with slots arrive when moe_experts() or grouped_linear() run. Weights that must stay on the device, such
  /// as adapters, are not passed. Throws c10::Error if the folder has no room; the weights then stay on the
  /// device.
  int64_t add(const std::vector<at::Tensor>& frozen, const std::vector<at::Tensor>& trained = {},
              const std::vector<at::Tensor>& stacks = {});

  /// Adds a table: a frozen, contiguous weight (rows, columns) of at least one row. It leaves the device.
  void add_table(const at::Tensor& weight);

  /// Returns embedding(weight, indices) for the weight of a table, and for any other weight. The host waits
  /// for the indices if they are on another device. Throws c10::IndexError for an index that is out of range.
  at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices) const;

  /// Returns forward(x), with the weights of the block on the device. Blocks run in the order of their
  /// indices. A block may run again in backward, within a checkpoint.
  at::Tensor run(int64_t block, const at::Tensor& x,
                 const std::function<at::Tensor(const at::Tensor&)>& forward);

  /// Calls `function` with the weights of a block on the device, to read or change them. `changed`: whether
  /// the weights are written back.
  void present(int64_t block, const std::function<void()>& function, bool changed = true);

  /// Brings all weights back to the device for good. The object has no blocks after that.
  void restore();

  /// Returns bytes: "fetched" to the device and "written" back so far; "away" of all blocks that do not stay,
  /// "device" of those of them that are on the device now, "host" in host memory, and "disk" in the file.
  std::map<std::string, int64_t> statistics() const;

 private:
  struct Store;
  std::unique_ptr<Store> store_;
};

}  // namespace shoestring
