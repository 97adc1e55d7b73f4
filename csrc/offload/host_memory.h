#pragma once

// Allocates host memory, which is pinned for copies from and to a GPU.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <shoestring/core/export.h>

namespace shoestring::offload {

/// Allocates host memory for tensors that leave a device. The memory comes in slabs of the requested size,
/// whereas PyTorch's allocator rounds pinned memory up to powers of two. Slabs are aligned for direct I/O, in
/// huge pages, and pinned if the backend of `device` can pin memory, as CUDA can. Freed memory is reused. A
/// tensor keeps its slab alive and may outlive this object. Thread-safe. A forked child may read the tensors,
/// but empty() raises there.
class SHOESTRING_API HostMemory {
 public:
  HostMemory(std::string caller, c10::Device device);

  /// Returns an uninitialised tensor (zero if its memory is new). If no free extent is large enough,
  /// allocates a new slab of at least `slab` bytes.
  at::Tensor empty(at::IntArrayRef shape, at::ScalarType dtype, int64_t slab = 0);

  /// Returns the total size in bytes of all slabs, whether in use or not.
  int64_t bytes() const;
  bool is_pinned() const;
  /// Frees the slabs that no tensor uses.
  void trim();

 private:
  struct Slabs;
  std::shared_ptr<Slabs> slabs_;
};

}  // namespace shoestring::offload
