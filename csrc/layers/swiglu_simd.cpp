// silu(gate) * up on the CPU, with the loops of layers/gated_simd.h. silu(x) is x times the logistic
// function.

#include "layers/swiglu_table.h"

#include "layers/gated_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

template <bool kShort>
struct Silu {
  F32 x;
  Logistic<kShort> s;
  explicit SHOESTRING_METHOD Silu(F32 x) : x(x), s(x) {}
  SHOESTRING_METHOD F32 of() const { return x * s.of; }
  SHOESTRING_METHOD F32 slope() const { return s.of + x * s.of * s.of_negative; }
};

}  // namespace

extern const kernels::GatedTable swiglu;
const kernels::GatedTable swiglu = gated_table<Silu>();

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
