#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstddef>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoint/operator_tape.h"

namespace shoestring::activations {

/// Leaves buffers of modules, such as the running statistics of batch norms, as they are before a run. The
/// second run of a checkpointed function changes them like the first run, and each batch counts once.
///
/// A buffer is copied before the first operator that writes to its storage, whatever tensor the operator
/// writes through. Buffers that the run does not change are not copied.
class KeptBuffers : public torch::CustomClassHolder, public OperatorWatch {
 public:
  explicit KeptBuffers(const std::vector<at::Tensor>& buffers);
  /// Starts the run on this thread. With `all`, copies every buffer now, for code that writes to buffers
  /// without an operator of PyTorch, as compiled code does.
  void begin(bool all);
  /// Ends the run that was started on this thread and puts the buffers back. Their versions do not change.
  void end();
  void before(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) override;

 private:
  struct Buffer {
    at::Tensor tensor;
    at::Tensor at_first;      // another tensor with the memory and the geometry of `tensor` before the run
    at::Tensor region, copy;  // the memory that is put back, and its contents; undefined until it is copied
    size_t bytes = 0;         // size of the storage
  };
  static void keep(Buffer& buffer);
  static void put_back(Buffer& buffer);
  std::unordered_multimap<const c10::StorageImpl*, Buffer> buffers_;
  bool all_ = false;
};

/// Keeps the buffers until done(), or until the destructor if an exception ends the run.
class KeptBuffersGuard {
 public:
  explicit KeptBuffersGuard(const std::vector<at::Tensor>& buffers) {
    if (buffers.empty()) return;
    kept_ = c10::make_intrusive<KeptBuffers>(buffers);
    kept_->begin(/*all=*/false);
  }
  ~KeptBuffersGuard() {
    try {
      done();
    } catch (...) {
    }
  }
  void done() {
    if (const auto kept = std::exchange(kept_, {})) kept->end();
  }
  KeptBuffersGuard(const KeptBuffersGuard&) = delete;
  KeptBuffersGuard& operator=(const KeptBuffersGuard&) = delete;

 private:
  c10::intrusive_ptr<KeptBuffers> kept_;
};

}  // namespace shoestring::activations
