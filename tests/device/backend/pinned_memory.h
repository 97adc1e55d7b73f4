#pragma once

// Pinned host memory: PyTorch's pin_memory(), and memory that the library page-locks by itself. The host may
// access it, but not while a device does. It is mapped twice like device memory. While a device writes it, as
// far as the host can know, the host's pages are inaccessible; while a device reads it, they are read-only.

#include <cstddef>

#include <ATen/core/CachingHostAllocator.h>

#include "detector.h"

namespace simdev {

at::HostAllocator* pinned_allocator();
bool is_pinned(const void* p);
/// Returns the address by which kernels access pinned memory, or null for other memory.
char* pinned_kernel_address(const void* p);

/// Pins memory that exists already. It must begin at a page. Returns an error text or null.
const char* pin(void* p, size_t size);
const char* unpin(void* p);

/// Keeps freed pinned memory from reuse until a stream has passed a position.
void use_pinned(const void* p, const Position& position);

/// Checks an access of a stream, records it, and protects the pages from the host. The caller holds
/// records().
void check_pinned_access(const Range& range, const Position& position, const Clock& clock, const char* name);
/// Gives the host access to what the operations in `clock` used. The caller holds records().
void release_pinned(const Clock& clock);

/// Installs the handler of SIGSEGV, which names accesses of the host to device memory and to protected pages.
void watch_host_accesses();

}  // namespace simdev
