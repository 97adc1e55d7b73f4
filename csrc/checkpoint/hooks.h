#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

// Saved-tensor hooks for C++, like torch.autograd.graph.saved_tensors_hooks in Python. While hooks are active
// on a thread, autograd calls them for each tensor that it saves for backward, and stores what they return
// instead.

namespace shoestring::activations {

/// The object that autograd stores in place of one saved tensor. unpack() returns the tensor.
struct Packed {
  virtual ~Packed() = default;
  virtual at::Tensor unpack() = 0;
};

struct SavedTensorHooks {
  virtual ~SavedTensorHooks() = default;
  /// Returns the replacement of `tensor`, which autograd is about to save and which is detached from the
  /// graph. Gradient mode is off during the call. These hooks do not apply to operators that the call runs,
  /// and selective checkpointing does not record such operators.
  virtual std::shared_ptr<Packed> pack(const at::Tensor& tensor) = 0;
};

/// Activates saved-tensor hooks on this thread while the guard lives. If guards are nested, only the hooks of
/// the innermost guard apply. If `hooks` is null, autograd saves tensors as usual.
class HooksGuard {
 public:
  /// Throws c10::Error unless install_autograd_engine() has been called. `caller` begins the error message.
  HooksGuard(const char* caller, std::shared_ptr<SavedTensorHooks> hooks);
  ~HooksGuard();
  HooksGuard(const HooksGuard&) = delete;
  HooksGuard& operator=(const HooksGuard&) = delete;
};

/// Throws c10::Error unless install_autograd_engine() has been called. `caller` begins the error message.
void expect_engine(const char* caller);

}  // namespace shoestring::activations
