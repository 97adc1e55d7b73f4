#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <shoestring/export.h>

namespace shoestring::offload {

/// Host memory for what a device has no room for: tensors in slabs of the size that is asked for (PyTorch's
/// own pinned memory comes in powers of two), aligned for direct I/O, in huge pages, and page-locked where
/// `device` is a GPU. What is freed is used again. Tensors keep their slab alive; they may outlive this
/// object. Thread-safe. A forked child may read the tensors; empty() raises there.
class SHOESTRING_API HostMemory {
 public:
  HostMemory(std::string caller, c10::Device device);

  /// Not initialised, but for that of a new slab, which is zeros. A slab is made where no free extent is
  /// large enough, of at least `slab` bytes.
  at::Tensor empty(at::IntArrayRef shape, at::ScalarType dtype, int64_t slab = 0);

  /// Of all slabs, in use or not.
  int64_t bytes() const;
  bool is_pinned() const;
  /// Gives back the slabs that nothing uses.
  void trim();

 private:
  struct Slabs;
  std::shared_ptr<Slabs> slabs_;
};

}  // namespace shoestring::offload
