#pragma once

// Activation offloading as custom classes and operators. shoestring/checkpoint/offload_activations.h wraps it
// for C++.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace shoestring::offload {

struct ActivationEntry;
struct ActivationStoreCore;

/// The speed of copies between device and host (or disk) while a computation runs.
struct LinkSpeed {
  double out_bytes_per_second, in_bytes_per_second;
  double copy_share;  // fraction of its own duration by which a copy delays the computation
  int64_t prefetch;   // number of layers that are copied back ahead of backward
};

/// Stands for one tensor that autograd has saved. Refers to an offloaded storage, together with the sizes and
/// strides of the tensor. If the tensor stays on the device, holds the tensor itself.
class StoredActivation : public torch::CustomClassHolder {
 public:
  explicit StoredActivation(const at::Tensor& x);
  ~StoredActivation() override;

  /// Returns the saved tensor on its device. May be called several times.
  at::Tensor reload();

 private:
  friend class ActivationStore;

  std::shared_ptr<ActivationStoreCore> core_;
  std::shared_ptr<ActivationEntry> entry_;
  at::Tensor kept_;  // the tensor itself, if it stays on the device
  c10::VariableVersion version_;
  uint32_t stored_version_;
  c10::DimVector sizes_, strides_;
  int64_t offset_ = 0;
  at::ScalarType dtype_;
  bool read_ = false;
};

/// Keeps the storages of saved tensors in host memory, or on a disk, between forward and backward. Each
/// storage is copied in the background and leaves the device when the next layer has begun. When backward
/// reloads a layer, the layers before it are prefetched. Thread-safe.
class ActivationStore : public torch::CustomClassHolder {
 public:
  /// Args:
  /// - device: "cpu" or an accelerator, whose tensors are offloaded.
  /// - compression: "none", "bf16" or "8bit".
  /// - prefetch: number of layers that are copied back ahead of backward.
  /// - max_pending: number of earlier layers whose copies may still be running; forward waits for the copies
  ///   of older layers.
  /// - min_bytes: storages of fewer bytes stay on the device.
  /// - folder: folder of the swap file; "" for no swap file.
  /// - host_bytes: bytes in host memory above which the swap file is used.
  ActivationStore(const std::string& device, const std::string& compression, int64_t prefetch,
                  int64_t max_pending, int64_t min_bytes, const std::string& folder, int64_t host_bytes);
  ~ActivationStore() override;

  c10::intrusive_ptr<StoredActivation> store(const at::Tensor& x);
  /// From now on, the storages of these tensors stay on the device. Meant for weights, and for tensors that
  /// stay alive anyway.
  void exclude(const std::vector<at::Tensor>& tensors);
  /// Begins a new layer. Storages that are stored from now on belong to it. If mark() is never called, each
  /// storage is a layer of its own.
  void mark();
  /// Blocks the host until at most `bytes` bytes of earlier layers are still on the device.
  void wait(int64_t bytes);
  /// Measures the speed of copies during a computation, and how much the copies slow the computation down.
  /// `bytes` is the size of the activations to be offloaded. If it exceeds host_bytes and there is a swap
  /// file, copies to the disk are measured.
  LinkSpeed measure_link(int64_t bytes) const;
  /// Returns figures for tests and reports.
  /// - Total bytes so far: "stored" by forward, "copied_out" and freed on the device, "reloaded" to the
  ///   device.
  /// - Bytes at present: "host" in slabs of host memory, "live" in used parts of the slabs, "disk" in the
  ///   swap file.
  /// - "entries": number of offloaded storages.
  c10::Dict<std::string, int64_t> statistics() const;

 private:
  std::shared_ptr<ActivationStoreCore> core_;
};

/// Registers StoredActivation, ActivationStore and their operators. The classes must be registered before the
/// schemas that name them.
void register_activation_store(torch::Library& library);

}  // namespace shoestring::offload
