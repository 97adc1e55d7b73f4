#pragma once

// Which build of the CPU kernels runs. Every *_simd.cpp is compiled once per capability, each time in a
// namespace of its own (so the linker can merge nothing between them), and exports one table of functions.

namespace shoestring::cpu {

enum class Capability { kPlain, kAvx2, kAvx512 };

/// The capability in use: the best that this machine has, or what SHOESTRING_CPU names.
Capability capability();

/// True where this machine and this build can run it.
bool supports(Capability capability);

/// Switches to another capability; false, and no change, where it is not supported. For tests and
/// comparisons.
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

// Declares the builds of a kernel table and the function shoestring::cpu::NAME() that returns the one in use.
// <op>_simd.cpp defines `extern const Table NAME{...}` inside `namespace
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
