#pragma once

// Parameters and gradients in host memory, for an optimizer that steps on the CPU because the device has no
// room for its state. Copies overlap the work of the device.

#include <cstdint>
#include <optional>
#include <vector>

#include "offload/state.h"

namespace shoestring::offload {

/// Host copies of the parameters of an arena. Thread-safe for calls on different parameters; calls on the
/// same parameter must not overlap.
class SHOESTRING_API HostParams : public torch::CustomClassHolder {
 public:
  HostParams(c10::intrusive_ptr<Offload> offload, const std::vector<Tensor>& params);
  ~HostParams() override;

  /// Returns the weights, contiguous, in host memory of exactly their size. A weight is up to date after
  /// collect(), until its parameter changes on the device.
  const std::vector<Tensor>& weights() const { return weights_; }

  /// Starts copying a gradient to the host, after the device's present work. Also copies the parameter if it
  /// changed since send(). The gradient is released when its copy has finished.
  void fetch(int64_t index, const Tensor& param, const std::optional<Tensor>& grad);
  /// Waits until fetched gradients have arrived and sent weights have left. Returns the gradients of
  /// parameters [first, last), or nothing for a parameter without a gradient.
  std::vector<std::optional<Tensor>> collect(int64_t first, int64_t last);
  /// Starts copying the weights of these parameters back to the device.
  void send(const std::vector<int64_t>& indices, const std::vector<Tensor>& params);
  /// Makes the later work of this thread on the device wait for all weights that were sent.
  void receive();

 private:
  struct Own {
    bool has_gradient = false;
    FencePtr fetched, sent;
    uint32_t version = 0;  // version of the parameter when it last equalled the host copy
    const void* data = nullptr;
    bool is_new = true;
  };
  std::vector<Tensor> slab(const std::vector<Tensor>& like);
  static void mark(Own& own, const Tensor& param);

  const c10::intrusive_ptr<Offload> offload_;
  std::vector<Tensor> weights_, gradients_;
  std::vector<Own> own_;
};

}  // namespace shoestring::offload
