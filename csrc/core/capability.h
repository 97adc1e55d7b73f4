#pragma once

// Selects among the builds of the CPU kernels. Every *_simd.cpp file is compiled once for each of plain
// x86-64, AVX2 and AVX-512. Each build has its own namespace, so that the linker cannot merge their
// functions. Each build exports one table of function pointers per operator. The capability kAmx uses the
// build for AVX-512, and matrix products of bf16 run on AMX tiles.

namespace shoestring::cpu {

enum class Capability { kPlain, kAvx2, kAvx512, kAmx };

/// Returns the capability whose CPU kernels are in use: the best one that this machine supports, or the one
/// that the environment variable SHOESTRING_CPU selects.
Capability capability();

/// Returns whether this machine and this build support the CPU capability.
bool supports(Capability capability);

/// Selects another CPU capability, for tests and comparisons. If the machine does not support it, changes
/// nothing and returns false.
bool set_capability(Capability capability);

/// Returns the name of a CPU capability that SHOESTRING_CPU takes.
const char* name(Capability capability);

/// Returns the kernel table for the CPU capability in use.
template <class Table>
const Table& choose(const Table& plain, const Table& avx2, const Table& avx512) {
  switch (capability()) {
    case Capability::kAmx:
    case Capability::kAvx512:
      return avx512;
    case Capability::kAvx2:
      return avx2;
    default:
      return plain;
  }
}

}  // namespace shoestring::cpu

// Declares an operator's table of CPU kernels for each capability. Also defines the function
// shoestring::cpu::NAME(), which returns the table of the capability in use. The operator's *_simd.cpp file
// defines `extern const Table NAME{...}` inside `namespace shoestring::cpu::SHOESTRING_CAPABILITY`.
#if defined(__x86_64__)
#define SHOESTRING_CPU_TABLE(Table, NAME)                                              \
  namespace shoestring::cpu {                                                          \
  namespace plain {                                                                    \
  extern const Table NAME;                                                             \
  }                                                                                    \
  namespace avx2 {                                                                     \
  extern const Table NAME;                                                             \
  }                                                                                    \
  namespace avx512 {                                                                   \
  extern const Table NAME;                                                             \
  }                                                                                    \
  inline const Table& NAME() { return choose(plain::NAME, avx2::NAME, avx512::NAME); } \
  }
#else
#define SHOESTRING_CPU_TABLE(Table, NAME)            \
  namespace shoestring::cpu {                        \
  namespace plain {                                  \
  extern const Table NAME;                           \
  }                                                  \
  inline const Table& NAME() { return plain::NAME; } \
  }
#endif
