#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

// Saved-tensor hooks for C++, as torch.autograd.graph.saved_tensors_hooks in Python. While hooks are pushed
// on a thread, autograd asks them what to store in place of each tensor that it saves for backward.

namespace shoestring::activations {

/// The replacement that autograd stores for one saved tensor.
struct Packed {
  virtual ~Packed() = default;
  virtual at::Tensor unpack() = 0;
};

struct SavedTensorHooks {
  virtual ~SavedTensorHooks() = default;
  /// tensor: what autograd saves, detached from the graph. During the call, gradient mode is off, and neither
  /// these hooks nor operator tapes apply.
  virtual std::shared_ptr<Packed> pack(const at::Tensor& tensor) = 0;
};

/// Pushes hooks on this thread during its own lifetime. Only the innermost hooks apply. If `hooks` is null,
/// tensors are saved as usual.
class HooksGuard {
 public:
  /// Raises in a process with Python's autograd engine, where these hooks cannot work. `caller` begins the
  /// message.
  HooksGuard(const char* caller, std::shared_ptr<SavedTensorHooks> hooks);
  ~HooksGuard();
  HooksGuard(const HooksGuard&) = delete;
  HooksGuard& operator=(const HooksGuard&) = delete;
};

}  // namespace shoestring::activations
