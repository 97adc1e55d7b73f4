// Conversions against CUDA's host headers and CUTLASS, and Philox against cuRAND's header.

#include <cmath>
#include <set>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cutlass/tfloat32.h>

#include "compare.h"

// cuRAND's functions as host code. CUDA's headers define the attributes that they are declared with.
#define QUALIFIERS static inline
#include <curand_philox4x32_x.h>

namespace twins {
namespace {

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
uint16_t bits_of_16(const void* x) {
  uint16_t bits;
  std::memcpy(&bits, x, 2);
  return bits;
}

// Lower halves of fp32 numbers beside every boundary at which rounding to 16 bits changes: a number halfway
// between two others ends at any of these 16 places, since fp16 has subnormal numbers.
std::set<uint32_t> lower_halves() {
  std::set<uint32_t> all{0, 0xffff};
  for (int place = 0; place < 16; ++place) {
    for (const uint32_t above : {0u, ~0u << (place + 1)}) {
      const uint32_t half = above | 1u << place;
      for (const uint32_t x : {half - 1, half, half + 1}) all.insert(x & 0xffff);
    }
  }
  return all;
}

void compare_conversions() {
  std::vector<int64_t> ours[6], cudas[6];
  for (const uint32_t low : lower_halves()) {
    for (uint32_t high = 0; high < 1 << 16; ++high) {
      const float x = float_of(high << 16 | low);
      const __nv_bfloat16 b = __float2bfloat16_rn(x);
      const __half h = __float2half_rn(x);
      ours[0].push_back(to_bf16(x));
      cudas[0].push_back(bits_of_16(&b));
      ours[1].push_back(to_fp16(x));
      cudas[1].push_back(bits_of_16(&h));
    }
  }
  for (uint32_t i = 0; i < 1 << 16; ++i) {
    __nv_bfloat16_raw b;
    __half_raw h;
    b.x = h.x = static_cast<uint16_t>(i);
    ours[2].push_back(from_bf16(b.x));
    cudas[2].push_back(bits_of_float(__bfloat162float(b)));
    ours[3].push_back(from_fp16(h.x));
    cudas[3].push_back(bits_of_float(__half2float(h)));
    const float x = static_cast<float>(i), y = -x / 7;
    uint16_t pair[2];
    const __nv_bfloat162 bs = __floats2bfloat162_rn(x, y);
    to_bf16_pair(x, y, pair);
    for (const int64_t e : {pair[0], pair[1]}) ours[4].push_back(e);
    for (const int64_t e : {bits_of_16(&bs.x), bits_of_16(&bs.y)}) cudas[4].push_back(e);
    const __half2 hs = __floats2half2_rn(x, y);
    to_fp16_pair(x, y, pair);
    for (const int64_t e : {pair[0], pair[1]}) ours[5].push_back(e);
    for (const int64_t e : {bits_of_16(&hs.x), bits_of_16(&hs.y)}) cudas[5].push_back(e);
  }
  const char* names[] = {"fp32 to bf16", "fp32 to fp16",          "bf16 to fp32",
                         "fp16 to fp32", "pairs of fp32 to bf16", "pairs of fp32 to fp16"};
  for (int i = 0; i < 6; ++i) compare(std::string("conversion: ") + names[i], ours[i], cudas[i]);
}

// CUTLASS adds half a unit and leaves the 13 bits that a product ignores. It has no rule for NaN.
void compare_tf32() {
  std::vector<int64_t> ours, cutlasses;
  for (const uint32_t low : lower_halves()) {
    for (uint32_t high = 0; high < 1 << 16; ++high) {
      const float x = float_of(high << 16 | low);
      if (std::isnan(x)) continue;
      ours.push_back(to_tf32(x));
      cutlasses.push_back(cutlass::tfloat32_t::round_half_ulp_truncate(x).raw() & ~0x1fffu);
    }
  }
  compare("conversion: fp32 to tf32", ours, cutlasses);
}

void compare_philox() {
  std::vector<int64_t> ours[3], curands[3];
  for (uint32_t i = 0; i < 1000; ++i) {
    // Counters and keys with many and with few bits.
    const auto word = [i](uint32_t n) { return (i * 8 + n) * 0x9e3779b9u >> i % 32; };
    const uint32_t counter[4] = {word(0), word(1), word(2), word(3)}, key[2] = {word(4), word(5)};
    uint4 c = make_uint4(counter[0], counter[1], counter[2], counter[3]);
    uint2 k = make_uint2(key[0], key[1]);
    const uint4 ten = curand_Philox4x32_10(c, k);
    for (int round = 0; round < philox_rounds(); ++round) {
      c = _philox4x32round(c, k);
      k.x += PHILOX_W32_0;
      k.y += PHILOX_W32_1;
    }
    uint32_t bits[4];
    const auto add = [&bits](std::vector<int64_t>* both, const uint4& theirs, std::vector<int64_t>& other) {
      for (const uint32_t x : bits) both->push_back(x);
      for (const uint32_t x : {theirs.x, theirs.y, theirs.z, theirs.w}) other.push_back(x);
    };
    philox(counter, key, 10, bits);
    add(&ours[0], ten, curands[0]);
    philox(counter, key, philox_rounds(), bits);
    add(&ours[1], c, curands[1]);
    // curand_init(seed, subsequence, offset) puts the seed into the key and moves the counter on, by the
    // subsequence in its upper half and by the offset in its lower half.
    const auto joined = [&](int n) { return uint64_t{counter[n + 1]} << 32 | counter[n]; };
    curandStatePhilox4_32_10_t state{};
    state.key = make_uint2(key[0], key[1]);
    Philox_State_Incr_hi(&state, joined(2));
    Philox_State_Incr(&state, joined(0));
    uint2 moved = state.key;
    uint4 drawn = state.ctr;
    for (int round = 0; round < philox_rounds(); ++round) {
      drawn = _philox4x32round(drawn, moved);
      moved.x += PHILOX_W32_0;
      moved.y += PHILOX_W32_1;
    }
    philox_at(uint64_t{key[1]} << 32 | key[0], joined(2), joined(0), bits);
    add(&ours[2], drawn, curands[2]);
  }
  compare("Philox: 10 rounds", ours[0], curands[0]);
  compare("Philox: the library's number of rounds", ours[1], curands[1]);
  compare("Philox: seed, step and index as cuRAND's seed, subsequence and offset", ours[2], curands[2]);
}

}  // namespace

void compare_numbers() {
  compare_conversions();
  compare_tf32();
  compare_philox();
}

}  // namespace twins
