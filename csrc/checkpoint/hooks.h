#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

// What Python has as torch.autograd.graph.saved_tensors_hooks, for C++: while hooks are pushed on a thread,
// autograd asks them what to keep in place of each tensor that it saves for backward.

namespace shoestring::activations {

/// What is kept in place of one saved tensor.
struct Packed {
  virtual ~Packed() = default;
  virtual at::Tensor unpack() = 0;
};

struct SavedTensorHooks {
  virtual ~SavedTensorHooks() = default;
  /// tensor: what autograd saves, not part of a graph. Gradients, these hooks and operator tapes are off
  /// meanwhile.
  virtual std::shared_ptr<Packed> pack(const at::Tensor& tensor) = 0;
};

/// Pushes hooks on this thread for its own lifetime; null: tensors are saved as ever. The innermost decide
/// alone.
class HooksGuard {
 public:
  /// `caller` begins the error where there can be no hooks: in a process whose autograd engine is Python's.
  HooksGuard(const char* caller, std::shared_ptr<SavedTensorHooks> hooks);
  ~HooksGuard();
  HooksGuard(const HooksGuard&) = delete;
  HooksGuard& operator=(const HooksGuard&) = delete;
};

}  // namespace shoestring::activations
