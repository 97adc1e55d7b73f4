#pragma once

// Weights of a model's blocks in host memory or in a file. shoestring/offload_weights.h wraps it for C++, and
// shoestring.offload_weights for Python.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace shoestring::offload {

struct WeightStoreCore;

/// Keeps the weights of blocks away from their device while no block needs them. The blocks run in the order
/// in which they were added, and backward in the reverse order. A block's weights arrive while the block
/// before it runs. They leave when a later block needs the room. So two blocks are on the device at a time,
/// besides those that stay. Thread-safe.
///
/// The tensors stay the same objects. While their weights are away, their storages have no memory, and every
/// read raises an error.
class WeightStore : public torch::CustomClassHolder {
 public:
  /// Args:
  /// - device: the device of the weights.
  /// - folder: folder of the file for weights; "" for host memory, which needs a device other than the CPU.
  /// - keep: bytes of weights that stay on the device all the time. Blocks that were added first stay.
  WeightStore(c10::Device device, const std::string& folder, int64_t keep);
  ~WeightStore() override;

  /// Adds a block with the storages of these tensors, and returns its index. Each storage may belong to one
  /// block. `trained`: the ones that backward changes, because the optimizer steps within it. If there is no
  /// room in the folder, raises an error and leaves the weights where they are.
  int64_t add(const std::string& name, const std::vector<at::Tensor>& frozen,
              const std::vector<at::Tensor>& trained);

  /// Adds a table: a frozen weight (rows, columns) that operators read a few rows at a time, and returns its
  /// index. linear_cross_entropy() and linear_distillation() read it as the weight of an output layer. If the
  /// module of the table runs, enter() and leave() bring it as a whole.
  int64_t add_table(const std::string& name, const at::Tensor& weight);
  /// Returns embedding(weight, indices) for the weight of a table. The host waits for the indices.
  at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices);

  /// Forward of a block begins: brings its weights, and starts to bring those of the next block. `inputs` are
  /// the block's inputs. When backward has computed their gradients, the block's backward has ended.
  void enter(int64_t block, const std::vector<at::Tensor>& inputs);
  /// Forward of a block ends. When backward computes the gradients of `outputs`, the block's backward begins.
  void leave(int64_t block, const std::vector<at::Tensor>& outputs);

  /// Brings a block's weights and keeps them until close(), so that the caller may read or change them.
  void open(int64_t block);
  /// Ends open(). `changed`: whether the caller has changed weights, of any kind.
  void close(int64_t block, bool changed);
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
