#pragma once

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

/// The speed of copies beside a computation.
struct LinkSpeed {
  double out_bytes_per_second, in_bytes_per_second;
  double copy_share;  // of a copy's time, the part by which the computation is delayed
  int64_t prefetch;   // layers
};

/// What is kept of one saved tensor: its own sizes and strides over a storage that has left the device, or
/// the tensor.
class StoredActivation : public torch::CustomClassHolder {
 public:
  explicit StoredActivation(const at::Tensor& x);
  ~StoredActivation() override;

  /// The tensor, on its device. May be called several times.
  at::Tensor reload();

 private:
  friend class ActivationStore;

  std::shared_ptr<ActivationStoreCore> core_;
  std::shared_ptr<ActivationEntry> entry_;
  at::Tensor kept_;  // where there is no entry
  c10::VariableVersion version_;
  uint32_t stored_version_;
  c10::DimVector sizes_, strides_;
  int64_t offset_ = 0;
  at::ScalarType dtype_;
  bool read_ = false;
};

/// Storages that autograd has saved, in host memory or on a disk, while forward and backward go on. What is
/// stored leaves when its layer is over, in the background; when a layer is reloaded, those before it follow
/// on their own. Thread-safe.
class ActivationStore : public torch::CustomClassHolder {
 public:
  /// compression: "none", "bf16" or "8bit". prefetch: layers. max_pending: layers whose copies may still be
  /// on their way when a later one begins; then forward waits. min_bytes: smaller storages stay. folder: of
  /// the swap file, "": none; host_bytes: what is stored on the host before the disk is used.
  ActivationStore(const std::string& device, const std::string& compression, int64_t prefetch,
                  int64_t max_pending, int64_t min_bytes, const std::string& folder, int64_t host_bytes);
  ~ActivationStore() override;

  c10::intrusive_ptr<StoredActivation> store(const at::Tensor& x);
  /// The tensors' storages stay where they are from now on: weights, and whatever lives on anyway.
  void exclude(const std::vector<at::Tensor>& tensors);
  /// What is stored from here on belongs to the next layer. Without it each storage is a layer of its own.
  void mark();
  /// On the host until at most so many bytes of layers that are over are still there.
  void wait(int64_t bytes);
  /// How quick copies are beside a computation, and what they take from it, by moving some: to the disk where
  /// there is one and so many bytes are more than host_bytes.
  LinkSpeed measure_link(int64_t bytes) const;
  /// For tests and reports: bytes "stored" by forward so far, "copied_out" and freed, and "reloaded"; now in
  /// "host" slabs, in "live" extents of them, and in the "disk" file; "entries" alive.
  c10::Dict<std::string, int64_t> statistics() const;

 private:
  std::shared_ptr<ActivationStoreCore> core_;
};

/// Registers the two classes, which schemas name, and the operators over them.
void register_activation_store(torch::Library& library);

}  // namespace shoestring::offload
