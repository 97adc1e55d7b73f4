// Twins that need no kernel: conversions of numbers, and random numbers.

#include "twins.h"

#include "core/philox.h"
#include "cuda/core/ptx.h"

namespace twins {

uint16_t to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
uint16_t to_fp16(float x) { return __half_as_ushort(__float2half_rn(x)); }
void to_bf16_pair(float x, float y, uint16_t (&pair)[2]) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  pair[0] = __bfloat16_as_ushort(both.x);
  pair[1] = __bfloat16_as_ushort(both.y);
}
void to_fp16_pair(float x, float y, uint16_t (&pair)[2]) {
  const __half2 both = __floats2half2_rn(x, y);
  pair[0] = __half_as_ushort(both.x);
  pair[1] = __half_as_ushort(both.y);
}
uint32_t from_bf16(uint16_t bits) { return __float_as_uint(__bfloat162float(__ushort_as_bfloat16(bits))); }
uint32_t from_fp16(uint16_t bits) { return __float_as_uint(__half2float(__ushort_as_half(bits))); }
uint32_t to_tf32(float x) { return shoestring::cuda::to_tf32(x); }

void philox(const uint32_t (&counter)[4], const uint32_t (&key)[2], int rounds, uint32_t (&bits)[4]) {
  const shoestring::kernels::Random4 r =
      shoestring::kernels::philox({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1], rounds);
  for (int i = 0; i < 4; ++i) bits[i] = r.value[i];
}
void philox_at(uint64_t seed, uint64_t step, uint64_t index, uint32_t (&bits)[4]) {
  const shoestring::kernels::Random4 r = shoestring::kernels::philox_at(seed, step, index);
  for (int i = 0; i < 4; ++i) bits[i] = r.value[i];
}
int philox_rounds() { return shoestring::kernels::kPhiloxRounds; }

}  // namespace twins
