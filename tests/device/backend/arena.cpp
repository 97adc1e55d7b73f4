#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include <c10/util/Exception.h>

#include "pinned_memory.h"

namespace simdev {

Mapping map_twice(size_t size, int tensor_access, void* at) {
  const int file = memfd_create("simdev", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0,
              "simdev: cannot create a file in memory: ", std::strerror(errno));
  const auto map = [&](void* address, int access, int flags) {
    void* p = mmap(address, size, access, MAP_SHARED | MAP_NORESERVE | flags, file, 0);
    TORCH_CHECK(p != MAP_FAILED, "simdev: cannot map ", size, " bytes: ", std::strerror(errno));
    return static_cast<char*>(p);
  };
  Mapping mapping;
  // The two addresses differ in their upper halves only. A number beside the upper half of an old address, in
  // bytes of an argument that nobody has set, may look like an address. Its translation does not change the
  // number.
  char* const below = at == nullptr ? nullptr : static_cast<char*>(at) - (uintptr_t{1} << 44);
  mapping.kernel = map(below, PROT_READ | PROT_WRITE, 0);
  mapping.tensor = map(at, tensor_access, at == nullptr ? 0 : MAP_FIXED);
  mapping.size = size;
  close(file);
  return mapping;
}

// The address of the memory of tensors. Linux maps nothing else there by itself. Addresses in the arguments
// of a kernel are found by their value, so no other argument may look like one. A word of an fp32 number, two
// flags and two unused bytes looks like an address of the range from which Linux takes others.
void* const kDeviceAddress = reinterpret_cast<void*>(uintptr_t{0x2a5a} << 32);

const Mapping& device_memory() {
  static const Mapping mapping = map_twice(kDevices * kDeviceBytes, PROT_NONE, kDeviceAddress);
  return mapping;
}

int device_of(const void* p) {
  const Mapping& memory = device_memory();
  if (!memory.contains(p)) return -1;
  return static_cast<int>(static_cast<size_t>(static_cast<const char*>(p) - memory.tensor) / kDeviceBytes);
}

char* kernel_address(const void* p) {
  const Mapping& memory = device_memory();
  if (memory.contains(p)) return memory.kernel_address(p);
  if (char* pinned = pinned_kernel_address(p)) return pinned;
  return static_cast<char*>(const_cast<void*>(p));
}

}  // namespace simdev
