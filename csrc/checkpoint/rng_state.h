#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace shoestring::activations {

/// The states of PyTorch's default random generators, of the CPU and of the accelerators that hold `tensors`.
class RngState {
 public:
  RngState() = default;  // a default-constructed RngState is empty
  explicit RngState(at::TensorList tensors);
  void restore() const;
  /// Returns the current states of the generators whose states this object holds.
  RngState present() const;

 private:
  std::vector<std::pair<c10::Device, at::Tensor>> states_;
};

/// The constructor saves the current states of the random generators whose states `of` holds. The destructor
/// restores the saved states.
class RngGuard {
 public:
  explicit RngGuard(const RngState& of) : before_(of.present()) {}
  ~RngGuard() { before_.restore(); }
  RngGuard(const RngGuard&) = delete;
  RngGuard& operator=(const RngGuard&) = delete;

 private:
  RngState before_;
};

}  // namespace shoestring::activations
