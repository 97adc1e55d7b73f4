#pragma once

// Lets host code call CUDA kernels without linking CUDA. As on the CPU, each operator has a table of
// functions. The library libshoestring_cuda registers its tables when it is loaded. Their functions take
// plain pointers and the CUDA stream.

#include <cstddef>
#include <typeinfo>

#include <shoestring/core/export.h>

namespace shoestring::cuda {

/// Functions of the CUDA runtime that host code needs in addition to the kernels.
struct Runtime {
  void* (*current_stream)(int device);  // the current stream of a device, a cudaStream_t
  // register_host page-locks host memory for all CUDA devices, and unregister_host unlocks it. Both return an
  // error message or null.
  const char* (*register_host)(void* memory, size_t size);
  const char* (*unregister_host)(void* memory);
};

/// The untyped functions behind provide() and provided(). The type must be the same in both.
SHOESTRING_API void provide(const char* name, const void* table, const std::type_info& type);
const void* provided(const char* name, const std::type_info& type);

/// Registers the table of CUDA kernels under the operator's name. The table must live as long as the process.
template <class Table>
void provide(const char* name, const Table* table) {
  provide(name, table, typeid(Table));
}

/// Returns the table of CUDA kernels that provide() registered under `name`. If there is none, raises an
/// error that says how to get CUDA kernels. Raises an internal error if the table has another type.
template <class Table>
const Table& table(const char* name) {
  return *static_cast<const Table*>(provided(name, typeid(Table)));
}

}  // namespace shoestring::cuda
