#pragma once

// Saved activations in host memory, or on a disk, between forward and backward.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/checkpoint_plan.h>
#include <shoestring/export.h>

namespace shoestring {

struct SHOESTRING_API OffloadActivationsOptions {
  /// Whose tensors leave; those of other devices stay. "": "cuda" where there is a GPU, else "cpu": to a
  /// folder, or compressed.
  TORCH_ARG(std::string, device) = "";
  /// "none"; "bf16": fp32 becomes bfloat16, to nearest (error at most 2^-8 of each element; above 3.39e38 it
  /// becomes infinity); "8bit": fp32, bf16 and fp16 become blocks of 256 8-bit codes (Dettmers et al., arXiv
  /// 2110.02861), error at most 0.00704 of the largest magnitude in the block, and all of a block with an
  /// element that is not finite comes back as NaN. Other types are never compressed.
  TORCH_ARG(std::string, compression) = "none";
  /// Layers that are copied back ahead of backward.
  TORCH_ARG(int64_t, prefetch) = 1;
  /// Layers whose copies may still be on their way when a later one begins; then forward waits for them.
  TORCH_ARG(int64_t, max_pending) = 2;
  /// Smaller storages stay.
  TORCH_ARG(int64_t, min_bytes) = 4096;
  /// Of a swap file for what does not fit into host_bytes; "": none.
  TORCH_ARG(std::string, folder) = "";
  TORCH_ARG(int64_t, host_bytes) = 0;
};

/// What autograd saves in its scopes leaves the device, and comes back for backward. What Python's
/// offload_activations does:
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
/// Storages are copied beside the computation and each once, however many saved tensors are views of it; they
/// are freed when they have been copied and their layer is over. Backward finds the last layer where it was,
/// and copies the layers before it back ahead of time. Without compression all gradients are bitwise those
/// without this. Host memory (page-locked for CUDA) is taken in the first step, and used again in each. A
/// saved tensor that is changed in place before backward is an error, as it is without this. No CUDA graphs.
///
/// Errors: c10::Error, of an option; of forward, where the disk is full or fails (the step can be repeated);
/// of scope(), in a process with Python's autograd engine.
class SHOESTRING_API OffloadActivations {
 public:
  /// exclude: tensors that live on anyway, whose storages stay: parameters, frozen ones too, and buffers.
  explicit OffloadActivations(const OffloadActivationsOptions& options = {},
                              const std::vector<at::Tensor>& exclude = {});
  ~OffloadActivations();
  OffloadActivations(const OffloadActivations&) = delete;
  OffloadActivations& operator=(const OffloadActivations&) = delete;

  /// What autograd saves on this thread while it lives; scopes end in the reverse order of their beginnings.
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

  /// These storages stay from now on.
  void exclude(const std::vector<at::Tensor>& tensors);
  /// A layer ends, and the next one begins. Without marks each saved storage is a layer of its own.
  void mark();
  /// Waits until at most so many bytes of layers that are over are still there, on their way.
  void wait(int64_t bytes);
  /// How quick copies are beside a computation, and what they take from it: for checkpoint_plan, found by
  /// moving some. With a folder and more bytes than host_bytes the disk's are meant.
  CheckpointPlanOptions measure_link(int64_t bytes) const;
  /// Bytes "stored", "copied_out" (encoded) and freed, and "reloaded" so far; now "live" in the slabs of the
  /// "host", and the size of the file on "disk"; and how many storages there are ("entries").
  std::map<std::string, int64_t> statistics() const;

 private:
  struct Store;
  std::unique_ptr<Store> store_;
};

}  // namespace shoestring
