#pragma once

// The memory of the simulated devices. It is one file in memory that is mapped twice. Tensors hold addresses
// of the first mapping, which no thread may read or write, ever. Kernels use the second mapping.

#include <cstddef>

#include <c10/core/DeviceType.h>

namespace simdev {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr size_t kPage = 4096;
constexpr size_t kDeviceBytes = size_t{16} << 30;  // address space; pages exist once they are written

/// Memory that is mapped at two addresses.
struct Mapping {
  char* tensor = nullptr;  // the address that tensors hold
  char* kernel = nullptr;  // the address that kernels use, which is always accessible
  size_t size = 0;

  bool contains(const void* p) const { return p >= tensor && p < tensor + size; }
  char* kernel_address(const void* p) const { return kernel + (static_cast<const char*>(p) - tensor); }
};

/// Maps `size` bytes of new memory twice. The first address has the protection `tensor_access`. If `at` is
/// not null, it is the first address, and what was mapped there is replaced.
Mapping map_twice(size_t size, int tensor_access, void* at = nullptr);

/// Returns the memory of all devices; that of a device begins at a multiple of kDeviceBytes.
const Mapping& device_memory();

/// Returns the index of the device that owns an address, or -1 for host memory.
int device_of(const void* p);

/// Returns the address by which kernels access device memory or pinned host memory. Returns other addresses
/// as they are.
char* kernel_address(const void* p);

}  // namespace simdev
