#pragma once

// The emulated CUDA kernels of shoestring (tests/simt), as kernels of this device. The host functions of its
// CUDA operators run unchanged on the host, and their launches become operations of the current stream.

#include <cstddef>

namespace simdev {

/// Hands launches over to streams, and provides the functions of the CUDA runtime that host code needs.
void connect_kernels();

/// Tells the emulator which memory kernels may access.
void add_kernel_memory(void* begin, size_t size);
void remove_kernel_memory(void* begin);

}  // namespace simdev
