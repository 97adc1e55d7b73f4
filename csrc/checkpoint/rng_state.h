#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace shoestring::activations {

/// The states of the CPU's default generator and of those of the accelerators that `tensors` lie on.
class RngState {
 public:
  RngState() = default;  // of no generator
  explicit RngState(at::TensorList tensors);
  void restore() const;
  /// The present states of the same generators.
  RngState present() const;

 private:
  std::vector<std::pair<c10::Device, at::Tensor>> states_;
};

/// Puts the generators back at its end, whatever happened in between.
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
