// Quantises fp32 tensors to the 8-bit format of optimizer state and back, on the CPU.

#include "quantization/quantize_8bit_table.h"

#include "quantization/dynamic_map_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

void quantize(const float* x, int64_t n, bool is_signed, uint8_t* codes, float* scale) {
  for (int64_t begin = 0; begin < n; begin += kStateBlock) {
    const int64_t count = n - begin < kStateBlock ? n - begin : kStateBlock;
    alignas(kBytes) float block[kStateBlock] = {};
    uint8_t out[kStateBlock];
    __builtin_memcpy(block, x + begin, count * sizeof(float));
    U32 most{};
    for (int64_t i = 0; i < kStateBlock; i += kLanes) most = larger<true>(most, load(block + i));
    const float top = largest(most);
    scale[begin / kStateBlock] = top;
    if (is_signed) {
      Encoder<true>()(block, top, out);
    } else {
      Encoder<false>()(block, top, out);
    }
    __builtin_memcpy(codes + begin, out, count);
  }
}

void dequantize(const uint8_t* codes, const float* scale, int64_t n, bool is_signed, float* x) {
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    const int64_t count = n - begin < kLanes ? n - begin : kLanes;
    uint8_t some[kLanes] = {};
    __builtin_memcpy(some, codes + begin, count);
    const float block = scale[begin / kStateBlock];
    const F32 value = is_signed ? Decoder<true>(block)(some) : Decoder<false>(block)(some);
    __builtin_memcpy(x + begin, &value, count * sizeof(float));
  }
}

}  // namespace

extern const kernels::Quantize8bitTable quantize_8bit;
const kernels::Quantize8bitTable quantize_8bit{quantize, dequantize};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
