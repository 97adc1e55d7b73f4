#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace shoestring::activations {

/// The states of the default generators of the CPU and of the accelerators that `tensors` are on.
class RngState {
 public:
  RngState() = default;  // holds the state of no generator
  explicit RngState(at::TensorList tensors);
  void restore() const;
  /// Reads the present states of the same generators.
  RngState present() const;

 private:
  std::vector<std::pair<c10::Device, at::Tensor>> states_;
};

/// Restores, in its destructor, the states that the generators had when it was constructed.
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
