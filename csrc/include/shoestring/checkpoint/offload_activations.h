#pragma once

// Keeps saved activations in host memory, or on a disk, between forward and backward.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/checkpoint/autograd.h>
#include <shoestring/checkpoint/checkpoint_plan.h>
#include <shoestring/core/export.h>

namespace shoestring {

struct SHOESTRING_API OffloadActivationsOptions {
  /// Device whose saved tensors are moved. Saved tensors on other devices stay there. The default "" means
  /// the accelerator that PyTorch finds, such as "cuda", and "cpu" if it finds none. With "cpu", activations
  /// go to a folder, or are compressed.
  TORCH_ARG(std::string, device) = "";
  /// How activations are compressed:
  /// - "none": not at all.
  /// - "bf16": fp32 becomes bfloat16, rounded to nearest. The error is at most 2^-8 of each element;
  ///   magnitudes above 3.39e38 become infinity.
  /// - "8bit": fp32, bf16 and fp16 become 8-bit codes in blocks of 256 (Dettmers et al., arXiv 2110.02861).
  ///   The error is at most 0.00704 of the largest magnitude in the block. A block with an element that is
  ///   not finite comes back as NaN.
  ///
  /// Other dtypes are never compressed. The order in which storages are saved decides which of them backward
  /// reads compressed, not the speed of the copies: equal steps of one thread have bitwise equal gradients.
  /// The storages of the last layer and of the max_pending layers before it stay on the device as they are,
  /// and so do storages that something else holds.
  TORCH_ARG(std::string, compression) = "none";
  /// Number of layers whose activations are copied back to the device before backward reaches the layers.
  TORCH_ARG(int64_t, prefetch) = 1;
  /// When forward begins a layer, the copies of this many preceding layers may still be running. Forward
  /// waits for the copies of all earlier layers. With compression, these layers stay on the device until then
  /// even if their copies have ended.
  TORCH_ARG(int64_t, max_pending) = 2;
  /// Storages of fewer bytes than this stay on the device.
  TORCH_ARG(int64_t, min_bytes) = 4096;
  /// Folder of a swap file for activations that do not fit into host_bytes; "": no swap file.
  TORCH_ARG(std::string, folder) = "";
  TORCH_ARG(int64_t, host_bytes) = 0;
};

/// Moves the tensors that autograd saves within its scopes off the device, and brings them back for backward.
/// The Python counterpart is offload_activations. Example:
///
///     OffloadActivations offload({}, model->parameters());
///     for (...) {
///       at::Tensor loss;
///       {
///         const auto scope = offload.scope();
///         loss = model->forward(batch);
///       }
///       loss.backward();
///     }
///
/// Copies overlap the computation. Each storage is copied once, however many saved tensors are views of it.
/// The device memory of a storage is freed when its copy has finished and its layer is over. The last layer
/// stays on the device, since backward begins with it. Earlier layers are copied back before backward needs
/// them.
///
/// Without compression all gradients are bitwise equal to those without offloading. Host memory (pinned for
/// CUDA) is allocated in the first training step and used again in each later step. Changing a saved tensor
/// in place before backward raises, as without offloading. CUDA graphs are not supported.
///
/// Works only in programs without Python. Throws c10::Error for an invalid option, and from scope() unless
/// install_autograd_engine() was called at the start of main(). Forward throws if the disk is full or fails;
/// the training step can then be repeated.
class SHOESTRING_API OffloadActivations {
 public:
  /// exclude: tensors whose storages stay on the device because they stay alive anyway: parameters (frozen
  /// ones too) and buffers.
  explicit OffloadActivations(const OffloadActivationsOptions& options = {},
                              const std::vector<at::Tensor>& exclude = {});
  ~OffloadActivations();
  OffloadActivations(const OffloadActivations&) = delete;
  OffloadActivations& operator=(const OffloadActivations&) = delete;

  /// While a scope lives, the tensors that autograd saves on this thread are moved off the device. Scopes
  /// must end in the reverse order of their beginnings.
  class SHOESTRING_API Scope {
   public:
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend class OffloadActivations;
    struct Hooks;
    explicit Scope(std::unique_ptr<Hooks> hooks);
    std::unique_ptr<Hooks> hooks_;
  };
  [[nodiscard]] Scope scope();

  /// Keeps the storages of `tensors` on the device from now on.
  void exclude(const std::vector<at::Tensor>& tensors);
  /// Marks the end of a layer and the beginning of the next one in forward. If mark() is never called, each
  /// saved storage is a layer of its own.
  void mark();
  /// Waits until at most `bytes` bytes of finished layers are still on the device because their copies are
  /// not complete.
  void wait(int64_t bytes);
  /// Measures the speed of copies during a computation, and how much the copies slow the computation down.
  /// Returns the results as options for checkpoint_plan. Measures the disk if there is a folder and `bytes`
  /// exceeds host_bytes.
  CheckpointPlanOptions measure_link(int64_t bytes) const;
  /// Returns counts of bytes since construction: "stored" (saved by forward), "copied_out" (compressed or
  /// copied, and then freed on the device) and "reloaded". Also returns present sizes in bytes: "host"
  /// (allocated host memory), "live" (the part of the host memory in use) and "disk" (the swap file).
  /// "entries" is the number of storages.
  std::map<std::string, int64_t> statistics() const;

 private:
  struct Store;
  std::unique_ptr<Store> store_;
};

}  // namespace shoestring
