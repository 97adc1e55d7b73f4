#pragma once

// Parameters and gradients in host memory, for an optimizer that steps on the CPU because the device has no
// room for the optimizer state. Copies overlap the computation on the device.

#include <cstdint>
#include <optional>
#include <vector>

#include "offload/state.h"

namespace shoestring::offload {

/// Host copies of the parameters of an optimizer and of their gradients. Thread-safe for calls on different
/// parameters; calls on the same parameter must not overlap.
class SHOESTRING_API HostParams : public torch::CustomClassHolder {
 public:
  HostParams(c10::intrusive_ptr<Offload> offload, const std::vector<Tensor>& params);
  ~HostParams() override;

  /// Returns the host copies of the weights, which are contiguous and in host memory of exactly their size. A
  /// host copy is up to date after collect(), until its parameter changes on the device.
  const std::vector<Tensor>& weights() const { return weights_; }

  /// Starts copying a gradient to the host, once the work that is in the device's current stream is done.
  /// Also copies the parameter if it has changed on the device since send(). The gradient is released when
  /// its copy has finished.
  void fetch(int64_t index, const Tensor& param, const std::optional<Tensor>& grad);
  /// Waits for the copies that fetch() and send() have started for parameters [first, last). Returns the host
  /// copies of their gradients, or nullopt for a parameter without a gradient.
  std::vector<std::optional<Tensor>> collect(int64_t first, int64_t last);
  /// Starts copying the weights of these parameters from the host back to the device.
  void send(const std::vector<int64_t>& indices, const std::vector<Tensor>& params);
  /// Makes later work in this thread's current stream wait for all weights that send() has started to copy.
  void receive();

 private:
  struct ParamState {
    bool has_gradient = false;
    FencePtr fetched, sent;
    uint32_t version = 0;  // version counter of the parameter when it last equalled its host copy
    const void* data = nullptr;
    bool is_new = true;
  };
  std::vector<Tensor> slab(const std::vector<Tensor>& like);
  static void mark(ParamState& state, const Tensor& param);

  const c10::intrusive_ptr<Offload> offload_;
  std::vector<Tensor> weights_, gradients_;
  std::vector<ParamState> states_;
};

}  // namespace shoestring::offload
