#include "offload/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/ceil_div.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/accumulate.h>

#include "core/cuda.h"
#include "core/device.h"
#include "offload/extents.h"
#include "offload/own_process.h"

namespace shoestring::offload {
namespace {

constexpr int64_t kHostAlignment = 4096;

int64_t aligned(int64_t size) { return at::round_up(size, kHostAlignment); }

}  // namespace

struct HostMemory::Slabs {
  struct Slab {
    char* begin;
    int64_t size, used;
    Extents extents;
  };

  std::string caller;
  c10::Device device;
  const cuda::Runtime* runtime = is_asynchronous(device) ? cuda::find_runtime(device) : nullptr;
  std::mutex mutex{};
  std::vector<Slab> all{};
  OwnProcess process{};

  ~Slabs() {
    for (const Slab& slab : all) unmap(slab);
  }

  Slab& add(int64_t size) {
    constexpr int kAccess = PROT_READ | PROT_WRITE, kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
    void* begin = ::mmap(nullptr, static_cast<size_t>(size), kAccess, kFlags, -1, 0);
    TORCH_CHECK(begin != MAP_FAILED, caller, ": expected ", size,
                " bytes of host memory, received none: ", std::strerror(errno));
    // Huge pages only make access faster, so an error of madvise is ignored.
    ::madvise(begin, static_cast<size_t>(size), MADV_HUGEPAGE);
    if (runtime != nullptr) {
      const c10::OptionalDeviceGuard guard(device);
      const char* error = runtime->register_host(begin, static_cast<size_t>(size));
      if (error != nullptr) ::munmap(begin, static_cast<size_t>(size));
      TORCH_CHECK(error == nullptr, caller, ": cannot page-lock ", size, " bytes of host memory: ", error);
    }
    Slab slab{static_cast<char*>(begin), size, 0, {}};
    slab.extents.free(0, size);
    return all.emplace_back(std::move(slab));
  }

  void unmap(const Slab& slab) const {
    if (runtime != nullptr && process.is_here()) runtime->unregister_host(slab.begin);
    ::munmap(slab.begin, static_cast<size_t>(slab.size));
  }

  void* allocate(int64_t size, int64_t slab_size) {
    process.check(caller);
    const std::lock_guard lock(mutex);
    for (Slab& slab : all) {
      if (const int64_t offset = slab.extents.allocate(size); offset >= 0) {
        slab.used += size;
        return slab.begin + offset;
      }
    }
    Slab& slab = add(std::max(size, aligned(slab_size)));
    slab.used += size;
    return slab.begin + slab.extents.allocate(size);
  }

  void free(char* memory, int64_t size) {
    if (!process.is_here()) return;
    const std::lock_guard lock(mutex);
    const auto slab = std::find_if(all.begin(), all.end(), [&](const Slab& s) {
      return memory >= s.begin && memory < s.begin + s.size;
    });
    slab->extents.free(memory - slab->begin, size);
    slab->used -= size;
  }
};

HostMemory::HostMemory(std::string caller, c10::Device device)
    : slabs_(new Slabs{std::move(caller), device}) {}

at::Tensor HostMemory::empty(at::IntArrayRef shape, at::ScalarType dtype, int64_t slab) {
  const int64_t bytes = c10::multiply_integers(shape) * static_cast<int64_t>(c10::elementSize(dtype));
  const auto options = at::TensorOptions().dtype(dtype);
  if (bytes == 0) return at::from_blob(nullptr, shape, options);
  void* memory = slabs_->allocate(aligned(bytes), slab);
  return at::from_blob(
      memory, shape,
      [slabs = slabs_, size = aligned(bytes)](void* begin) { slabs->free(static_cast<char*>(begin), size); },
      options);
}

int64_t HostMemory::bytes() const {
  const std::lock_guard lock(slabs_->mutex);
  int64_t total = 0;
  for (const auto& slab : slabs_->all) total += slab.size;
  return total;
}

bool HostMemory::is_pinned() const { return slabs_->runtime != nullptr; }

void HostMemory::trim() {
  slabs_->process.check(slabs_->caller);
  const std::lock_guard lock(slabs_->mutex);
  std::erase_if(slabs_->all, [&](const Slabs::Slab& slab) {
    if (slab.used == 0) slabs_->unmap(slab);
    return slab.used == 0;
  });
}

}  // namespace shoestring::offload
