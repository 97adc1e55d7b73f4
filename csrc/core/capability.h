#pragma once

// Selects the build of the CPU kernels. Every *_simd.cpp is compiled once per capability, each time in its
// own namespace, so that the linker merges no code between builds. Each build exports one table of functions.

namespace shoestring::cpu {

enum class Capability { kPlain, kAvx2, kAvx512 };

/// Returns the capability in use: the best one of this machine, or the one that SHOESTRING_CPU selects.
Capability capability();

/// Returns true if this machine and this build support the capability.
bool supports(Capability capability);

/// Selects another capability, for tests and comparisons. Returns false and changes nothing if it is not
/// supported.
bool set_capability(Capability capability);

const char* name(Capability capability);

template <class Table>
const Table& choose(const Table& plain, const Table& avx2, const Table& avx512) {
  switch (capability()) {
    case Capability::kAvx512:
      return avx512;
    case Capability::kAvx2:
      return avx2;
    default:
      return plain;
  }
}

}  // namespace shoestring::cpu

// Declares a kernel table for each capability and the function shoestring::cpu::NAME(), which returns the
// table in use. <op>_simd.cpp defines `extern const Table NAME{...}` inside `namespace
// shoestring::cpu::SHOESTRING_CAPABILITY`.
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
