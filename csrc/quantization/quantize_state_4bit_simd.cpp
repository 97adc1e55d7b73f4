// Quantises fp32 tensors to the 4-bit format of optimizer state and back, on the CPU.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own AVX-512 headers
#endif

#include "quantization/quantize_state_4bit_table.h"

#include "quantization/map_4bit_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::kBlockBytes4;

// Calls body(first element, number of elements, block index) for each block of kStateBlock elements.
template <class Body>
SHOESTRING_INLINE void over_blocks(int64_t n, Body body) {
  for (int64_t begin = 0; begin < n; begin += kStateBlock) {
    body(begin, n - begin < kStateBlock ? n - begin : kStateBlock, begin / kStateBlock);
  }
}

template <bool kSigned>
void quantize_map(const float* x, int64_t n, Rounding4 rounding, uint8_t* codes, float* scale) {
  over_blocks(n, [&](int64_t begin, int64_t count, int64_t block) {
    float padded[kStateBlock] = {};
    __builtin_memcpy(padded, x + begin, count * sizeof(float));
    Encoder4<kSigned> encode(rounding);
    encode(padded, scale + block * kScales4<kSigned>, codes + block * kBlockBytes4);
  });
}

template <bool kSigned>
void dequantize_map(const uint8_t* codes, const float* scale, int64_t n, float* x) {
  over_blocks(n, [&](int64_t begin, int64_t count, int64_t block) {
    const Decoder4<kSigned> decode(codes + block * kBlockBytes4, scale + block * kScales4<kSigned>);
    for (int64_t i = 0; i < count; i += kLanes) {
      store(x + begin + i, decode(i), count - i < kLanes ? count - i : kLanes);
    }
  });
}

void quantize(const float* x, int64_t n, bool is_signed, Rounding4 rounding, uint8_t* codes, float* scale) {
  is_signed ? quantize_map<true>(x, n, rounding, codes, scale)
            : quantize_map<false>(x, n, rounding, codes, scale);
}

void dequantize(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x) {
  is_signed ? dequantize_map<true>(codes, scale, n, x) : dequantize_map<false>(codes, scale, n, x);
}

}  // namespace

extern const kernels::QuantizeState4bitTable quantize_state_4bit;
const kernels::QuantizeState4bitTable quantize_state_4bit{quantize, dequantize};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
