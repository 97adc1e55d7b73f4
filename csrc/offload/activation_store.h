#pragma once

// Operator-level interface of activation offloading; shoestring/offload_activations.h wraps it for C++.

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

/// The speed of copies while a computation runs.
struct LinkSpeed {
  double out_bytes_per_second, in_bytes_per_second;
  double copy_share;  // fraction of a copy's duration by which it delays the computation
  int64_t prefetch;   // number of layers to prefetch
};

/// Stands for one saved tensor. Holds the sizes and strides of the tensor over a storage that has left the
/// device, or the tensor itself if it stays.
class StoredActivation : public torch::CustomClassHolder {
 public:
  explicit StoredActivation(const at::Tensor& x);
  ~StoredActivation() override;

  /// Returns the tensor on its device. May be called several times.
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

/// Keeps storages that autograd has saved in host memory, or on a disk, between forward and backward. Each
/// storage is copied in the background and leaves the device when its layer is over. When backward reloads a
/// layer, the layers before it are prefetched. Thread-safe.
class ActivationStore : public torch::CustomClassHolder {
 public:
  /// Args:
  /// - compression: "none", "bf16" or "8bit".
  /// - prefetch: number of layers that are copied back ahead of backward.
  /// - max_pending: number of earlier layers whose copies may still be running; forward waits for older ones.
  /// - min_bytes: smaller storages stay on the device.
  /// - folder: folder of the swap file; "": no swap file.
  /// - host_bytes: bytes in host memory before the swap file is used.
  ActivationStore(const std::string& device, const std::string& compression, int64_t prefetch,
                  int64_t max_pending, int64_t min_bytes, const std::string& folder, int64_t host_bytes);
  ~ActivationStore() override;

  c10::intrusive_ptr<StoredActivation> store(const at::Tensor& x);
  /// Keeps the storages of these tensors on the device from now on: weights, and tensors that stay alive
  /// anyway.
  void exclude(const std::vector<at::Tensor>& tensors);
  /// Begins a new layer for what is stored from now on. Without marks, each storage is a layer of its own.
  void mark();
  /// Blocks the host until at most `bytes` bytes of finished layers are still on the device.
  void wait(int64_t bytes);
  /// Measures the speed of copies during a computation, and how much they slow it down. Measures the disk if
  /// there is a swap file and `bytes` exceeds host_bytes.
  LinkSpeed measure_link(int64_t bytes) const;
  /// Returns figures for tests and reports. Bytes so far: "stored" by forward, "copied_out" (and freed),
  /// "reloaded". Bytes now: "host" (slabs), "live" (their part in use), "disk" (the file). "entries": number
  /// of storages.
  c10::Dict<std::string, int64_t> statistics() const;

 private:
  std::shared_ptr<ActivationStoreCore> core_;
};

/// Registers the two classes, which must precede the schemas that name them, and the operators on them.
void register_activation_store(torch::Library& library);

}  // namespace shoestring::offload
