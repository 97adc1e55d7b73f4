// Multiplies the columns of a block of a matrix by gains. The block is small and its result is read at once,
// so all time goes into the conversions.

#include "quantization/scale_columns_table.h"

#include "core/element_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

template <class From, class To>
void scale(const typename From::Type* from, int64_t stride, const float* gain, int64_t rows, int64_t columns,
           typename To::Type* out) {
  for (int64_t r = 0; r < rows; ++r, from += stride, out += columns) {
    int64_t c = 0;
    for (; c + 2 * kLanes <= columns; c += 2 * kLanes) {
      To::store(out + c, From::load(from + c) * load(gain + c),
                From::load(from + c + kLanes) * load(gain + c + kLanes));
    }
    if (c < columns) {
      const int64_t left = columns - c;
      typename To::Type rest[2 * kLanes];
      To::store(rest, load_some<From>(from + c, left) * load_some<Float>(gain + c, left),
                load_some<From>(from + c + kLanes, left - kLanes) *
                    load_some<Float>(gain + c + kLanes, left - kLanes));
      __builtin_memcpy(out + c, rest, left * sizeof *rest);
    }
  }
}

#if defined(__AVX512F__)
#pragma GCC push_options
#pragma GCC target("avx512bf16")
// Rounds by the CPU's bf16 instructions, which take a third of the time. They round subnormal numbers to
// zero.
template <class From>
void scale_by_units(const typename From::Type* from, int64_t stride, const float* gain, int64_t rows,
                    int64_t columns, uint16_t* out) {
  for (int64_t r = 0; r < rows; ++r, from += stride, out += columns) {
    for (int64_t c = 0; c < columns; c += 2 * kLanes) {
      const int64_t left = columns - c, more = left - kLanes;
      const F32 x = load_some<From>(from + c, left) * load_some<Float>(gain + c, left),
                y = load_some<From>(from + c + kLanes, more) * load_some<Float>(gain + c + kLanes, more);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
      const __mmask32 stored = left < 2 * kLanes ? (1u << left) - 1 : ~0u;
      _mm512_mask_storeu_epi16(out + c, stored, both);
    }
  }
}
#pragma GCC pop_options
#endif

}  // namespace

extern const kernels::ScaleColumnsTable scale_columns;
const kernels::ScaleColumnsTable scale_columns{
    scale<Float, Float>,    scale<BFloat16, Float>,    scale<Half, Float>,
    scale<Float, BFloat16>, scale<BFloat16, BFloat16>, scale<Half, BFloat16>,
#if defined(__AVX512F__)
    scale_by_units<Float>,  scale_by_units<BFloat16>,  scale_by_units<Half>,
#endif
};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
