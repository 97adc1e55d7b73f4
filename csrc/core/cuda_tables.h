#pragma once

// How host code in ops/ reaches CUDA kernels without linking CUDA: as on the CPU, an operator's kernels are a
// table of functions. libshoestring_cuda hands its tables over when it is loaded; launchers take a stream and
// plain pointers.

#include <cstddef>
#include <typeinfo>

#include <shoestring/export.h>

namespace shoestring::cuda {

/// What ops/ needs beside the kernels.
struct Runtime {
  void* (*current_stream)(int device);  // a cudaStream_t
  // Page-locks host memory of the caller's for the current device, and undoes it; an error's text or null.
  const char* (*register_host)(void* memory, size_t size);
  const char* (*unregister_host)(void* memory);
};

SHOESTRING_API void provide(const char* name, const void* table, const std::type_info& type);
const void* provided(const char* name, const std::type_info& type);

/// Hands over the table of the CUDA kernels of `name`. The table must live as long as the process.
template <class Table>
void provide(const char* name, const Table* table) {
  provide(name, table, typeid(Table));
}

/// Returns the table that `provide` got for `name`. Raises an error that says how to get CUDA kernels if
/// there is none, and an internal error if the table has another type.
template <class Table>
const Table& table(const char* name) {
  return *static_cast<const Table*>(provided(name, typeid(Table)));
}

}  // namespace shoestring::cuda
