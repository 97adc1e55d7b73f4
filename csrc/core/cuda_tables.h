#pragma once

// How host code in ops/ reaches CUDA kernels without linking CUDA: as on the CPU, an operator's kernels are a
// table of functions. libshoestring_cuda hands its tables over when it is loaded; launchers take a stream and
// plain pointers.

#include <cstddef>

#include <shoestring/export.h>

namespace shoestring::cuda {

/// What ops/ needs beside the kernels.
struct Runtime {
  void* (*current_stream)(int device);  // a cudaStream_t
  // Page-locks host memory of the caller's for the current device, and undoes it; an error's text or null.
  const char* (*register_host)(void* memory, size_t size);
  const char* (*unregister_host)(void* memory);
};

SHOESTRING_API void provide(const char* name, const void* table);

/// The table that `name` was given; an error that says how to get the CUDA kernels where there is none.
const void* provided(const char* name);

template <class Table>
const Table& table(const char* name) {
  return *static_cast<const Table*>(provided(name));
}

}  // namespace shoestring::cuda
