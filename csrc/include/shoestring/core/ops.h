#pragma once

// The kernels in use.

#include <string>

#include <shoestring/core/export.h>

namespace shoestring {

/// Returns the CPU kernels in use: "plain", "avx2", "avx512" or "amx". "amx" means those for AVX-512, and
/// AMX tiles for products of bf16 matrices. The default is the best that this machine supports. The
/// environment variable SHOESTRING_CPU selects another one when the library is loaded.
SHOESTRING_API std::string cpu_capability();

/// Selects other CPU kernels, for tests and comparisons. Returns false and changes nothing if this machine
/// does not support the kernels `name`.
SHOESTRING_API bool set_cpu_capability(const std::string& name);

}  // namespace shoestring
