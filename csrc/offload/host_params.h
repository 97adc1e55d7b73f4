#pragma once

// What the CPU steps where a device has no room for the state of its optimizer: parameters and gradients in
// host memory, and how they come there and go back beside what the device does.

#include <cstdint>
#include <optional>
#include <vector>

#include "offload/state.h"

namespace shoestring::offload {

/// Those of an arena. Any thread may call; for one parameter, one at a time.
class SHOESTRING_API HostParams : public torch::CustomClassHolder {
 public:
  HostParams(c10::intrusive_ptr<Offload> offload, const std::vector<Tensor>& params);
  ~HostParams() override;

  /// Contiguous, in exact-size host memory. Each up to date after collect(), until its parameter is changed
  /// on the device.
  const std::vector<Tensor>& weights() const { return weights_; }

  /// Begins to bring a gradient to the host, after what the device does by now, and the parameter where it is
  /// not as send() has left it. Nothing keeps the gradient once it has gone.
  void fetch(int64_t index, const Tensor& param, const std::optional<Tensor>& grad);
  /// On the host until that is there, and what was sent has gone: the gradients of parameters [first, last),
  /// in the place of those that have none an undefined tensor.
  std::vector<std::optional<Tensor>> collect(int64_t first, int64_t last);
  /// Begins to bring the weights of these parameters back to the device.
  void send(const std::vector<int64_t>& indices, const std::vector<Tensor>& params);
  /// What this thread gives the device to do from now on comes after all that was sent.
  void receive();

 private:
  struct Own {
    bool has_gradient = false;
    FencePtr fetched, sent;
    uint32_t version = 0;  // of the parameter when the two were the same last
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
