// Dequantises int8 weights on the CPU. The kernel is bound by memory bandwidth: it reads one byte per element
// and writes two or four. An element takes one conversion and two multiplications.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own AVX-512 headers
#endif

#include "quantization/quantize_int8_table.h"

#include "core/vec_simd.h"
#include "quantization/packed_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::PackedInt8;

constexpr int kStep = 2 * kLanes;

// Multiplies by the scale and then by 1 / 127, and so rounds twice, as bitsandbytes does.
SHOESTRING_INLINE F32 decode(const int8_t* codes, F32 scale) {
  return to_float(codes) * scale * kernels::kInverse127;
}

struct ToFloat {
  SHOESTRING_METHOD void operator()(F32 a, F32 b, float* out) const {
    store(out, a);
    store(out + kLanes, b);
  }
};
struct ToBf16 {
  SHOESTRING_METHOD void operator()(F32 a, F32 b, uint16_t* out) const {
    store_upper_halves(out, rounded_bf16(a), rounded_bf16(b));
  }
};
struct ToFp16 {
  SHOESTRING_METHOD void operator()(F32 a, F32 b, uint16_t* out) const {
    const U16 x = to_fp16(a), y = to_fp16(b);
    __builtin_memcpy(out, &x, sizeof x);
    __builtin_memcpy(out + kLanes, &y, sizeof y);
  }
};

template <class T, class Store>
SHOESTRING_INLINE void dequantize(const PackedInt8& p, int64_t begin, int64_t end, T* out, Store put) {
  for (int64_t row = begin / p.columns; begin < end; ++row) {
    const int64_t stop = (row + 1) * p.columns < end ? (row + 1) * p.columns : end;
    const F32 scale = splat(p.absmax[row]);
    for (; begin + kStep <= stop; begin += kStep, out += kStep) {
      put(decode(p.codes + begin, scale), decode(p.codes + begin + kLanes, scale), out);
    }
    if (begin == stop) continue;
    int8_t rest[kStep] = {};
    T last[kStep];
    __builtin_memcpy(rest, p.codes + begin, stop - begin);
    put(decode(rest, scale), decode(rest + kLanes, scale), last);
    __builtin_memcpy(out, last, (stop - begin) * sizeof(T));
    out += stop - begin;
    begin = stop;
  }
}

void dequantize_float(const PackedInt8& p, int64_t begin, int64_t end, float* out) {
  dequantize(p, begin, end, out, ToFloat());
}
void dequantize_bf16(const PackedInt8& p, int64_t begin, int64_t end, uint16_t* out) {
  dequantize(p, begin, end, out, ToBf16());
}
void dequantize_fp16(const PackedInt8& p, int64_t begin, int64_t end, uint16_t* out) {
  dequantize(p, begin, end, out, ToFp16());
}

}  // namespace

extern const kernels::DequantizeInt8Table dequantize_int8;
const kernels::DequantizeInt8Table dequantize_int8{dequantize_float, dequantize_bf16, dequantize_fp16};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
