#pragma once

// Tells devices apart: the CPU, whose operators return results; all other devices, whose kernels run later on
// streams; and among these CUDA. No other file asks whether a tensor is on CUDA.

#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/library.h>

namespace shoestring {

/// Returns whether kernels on the device run after the operator that starts them has returned. Their order
/// is then given by streams and events, and the host has to wait before it reads a result. This holds for
/// every device except the CPU and "meta".
inline bool is_asynchronous(c10::Device device) { return !device.is_cpu() && !device.is_meta(); }
inline bool is_asynchronous(const at::Tensor& t) { return is_asynchronous(t.device()); }

/// Returns whether the device is a GPU that PyTorch calls "cuda", for which cuBLAS computes matrix products.
inline bool is_cuda(const at::Tensor& t) { return t.is_cuda(); }

/// Blocks the host until all streams of the device have finished. Returns at once for the CPU.
void synchronize(c10::Device device);

/// Returns the device with the index of the current device of its type, if it has no index.
c10::Device with_index(c10::Device device);

/// Returns PyTorch's accelerator if this machine has one, else the CPU. The accelerator is a registered
/// backend of the type PrivateUse1, or a GPU.
c10::Device default_device();

/// Registers the autocast rules of operators with the dispatcher, for every device type on which the
/// operators have kernels: the CPU, CUDA and PrivateUse1. `add(library, type)` is called once for each type,
/// where decltype(type)::value is the c10::DeviceType.
class AutocastRules {
 public:
  template <class Add>
  explicit AutocastRules(const Add& add) {
    one<c10::DeviceType::CPU>(c10::DispatchKey::AutocastCPU, add);
    one<c10::DeviceType::CUDA>(c10::DispatchKey::AutocastCUDA, add);
    one<c10::DeviceType::PrivateUse1>(c10::DispatchKey::AutocastPrivateUse1, add);
  }

 private:
  template <c10::DeviceType type, class Add>
  void one(c10::DispatchKey key, const Add& add) {
    libraries_.emplace_back(torch::Library::IMPL, "shoestring", key, __FILE__, __LINE__);
    add(libraries_.back(), std::integral_constant<c10::DeviceType, type>());
  }

  std::vector<torch::Library> libraries_;
};

}  // namespace shoestring
