#pragma once

// Weights of a model's blocks in host memory or in a file. shoestring/checkpoint/offload_weights.h wraps it
// for C++, and shoestring.offload_weights for Python.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace shoestring::offload {

struct WeightBlock;
struct WeightStoreCore;

/// Keeps the weights of a block on the device until close(), or until it is destroyed.
class WeightsHere : public torch::CustomClassHolder {
 public:
  WeightsHere(std::shared_ptr<WeightStoreCore> core, std::shared_ptr<WeightBlock> block, bool changed);
  ~WeightsHere() override;
  WeightsHere(const WeightsHere&) = delete;
  WeightsHere& operator=(const WeightsHere&) = delete;

  /// Does nothing in a second call.
  void close();

 private:
  const std::shared_ptr<WeightStoreCore> core_;
  std::shared_ptr<WeightBlock> block_;
};

/// Keeps the weights of blocks away from their device while no block needs them. The blocks run in the order
/// in which they were added, and backward in the reverse order. A block's weights arrive while the block
/// before it runs. They leave when a later block needs the room. So two blocks are on the device at a time,
/// besides those that stay. Thread-safe.
///
/// The tensors stay the same objects. Their storages have memory only while their block is in use: in its
/// forward and backward, and within open(). Outside, every read and write raises an error. A change during a
/// use that the tensor's version counter notices is written back.
class WeightStore : public torch::CustomClassHolder {
 public:
  /// Args:
  /// - device: the device of the weights.
  /// - folder: folder of the file for weights; "" for host memory, which needs a device other than the CPU.
  /// - keep: bytes of weights that stay on the device all the time. Blocks that were added first stay.
  /// - steps: whether an optimizer steps weights within backward, also those that require gradients later.
  ///   Without it, and without trained weights in add(), a forward raises if a weight requires gradients.
  WeightStore(c10::Device device, const std::string& folder, int64_t keep, bool steps);
  ~WeightStore() override;

  /// Adds a block with the storages of these tensors, and returns its index. Each storage may belong to one
  /// block. `trained`: the ones that backward changes, because the optimizer steps within it. `stacks`:
  /// frozen tensors (matrices, ...), such as the weights of experts. On the CPU, a run of the block does not
  /// bring them: moe_experts() and grouped_linear() bring the matrices that have slots. If there is no room
  /// in the folder, raises an error and leaves the weights where they are.
  int64_t add(const std::string& name, const std::vector<at::Tensor>& frozen,
              const std::vector<at::Tensor>& trained, const std::vector<at::Tensor>& stacks = {});

  /// Adds a table: a frozen weight (rows, columns) that operators read a few rows at a time, and returns its
  /// index. linear_cross_entropy() and linear_distillation() read it as the weight of an output layer. If the
  /// module of the table runs, enter() and leave() bring it as a whole.
  int64_t add_table(const std::string& name, const at::Tensor& weight);
  /// Returns embedding(weight, indices) for the weight of a table. The host waits for the indices.
  at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices);

  /// Forward of a block begins: brings its weights, and starts to bring those of the next block. `inputs` are
  /// the block's inputs. When backward has computed their gradients, the block's backward has ended.
  /// `can_vanish` is that of BlockRuns::enter.
  void enter(int64_t block, const std::vector<at::Tensor>& inputs, bool can_vanish = false);
  /// Forward of a block ends. When backward computes the gradients of `outputs`, the block's backward begins.
  void leave(int64_t block, const std::vector<at::Tensor>& outputs);
  /// Brings a block's weights until end(), as enter() and leave() do, to read or change them in hooks that an
  /// exception may separate.
  void begin(int64_t block, bool changed);
  void end(int64_t block);

  /// Brings a block's weights and keeps them while the result lives, so that the caller may read or change
  /// them. `changed`: whether the caller changes weights, of any kind. They are then written back.
  c10::intrusive_ptr<WeightsHere> open(int64_t block, bool changed);
  /// Brings all weights back for good. The store has no blocks after that.
  void restore();

  /// Returns figures for tests and reports.
  /// - Total bytes so far: "fetched" to the device and "written" back.
  /// - Bytes at present: "away" weights of blocks that do not stay, "device" weights of these blocks that are
  ///   on the device, "host" in host memory, "disk" in the file.
  c10::Dict<std::string, int64_t> statistics() const;

 private:
  std::shared_ptr<WeightStoreCore> core_;
};

void register_weight_store(torch::Library& library);

}  // namespace shoestring::offload
