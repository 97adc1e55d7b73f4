#pragma once

// Lets host code call CUDA kernels without linking CUDA. As on the CPU, an operator's kernels are a table of
// functions. libshoestring_cuda registers its tables when it is loaded. The launchers in them take a stream
// and plain pointers.

#include <cstddef>
#include <typeinfo>

#include <shoestring/export.h>

namespace shoestring::cuda {

/// Functions of the CUDA runtime that host code needs in addition to the kernels.
struct Runtime {
  void* (*current_stream)(int device);  // returns a cudaStream_t
  // Page-locks the caller's host memory for all CUDA devices, or unlocks it. Returns an error text or null.
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
