#pragma once

// A block's moments are decoded, updated and left in the first-level cache, 1 KiB each, where their largest magnitudes
// become the new scales; encoding reads them from there. Three short loops keep more work in flight than one long
// chain of dependent instructions would.

#include <utility>

#include "cpu/dynamic_map.h"
#include "kernels/optimizer.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::OptimizerTensor;
using kernels::WeightType;

struct Float {
  using Type = float;
  static SHOESTRING_METHOD F32 load(const float* p) { return load_as<F32>(p); }
  static SHOESTRING_METHOD void store(float* p, F32 x) { __builtin_memcpy(p, &x, sizeof x); }
};
struct BFloat16 {
  using Type = uint16_t;
  static SHOESTRING_METHOD F32 load(const uint16_t* p) { return from_bf16(load_as<U16>(p)); }
  static SHOESTRING_METHOD void store(uint16_t* p, F32 x) {
    U16 y = to_bf16(x);
    __builtin_memcpy(p, &y, sizeof y);
  }
};
struct Half {
  using Type = uint16_t;
  static SHOESTRING_METHOD F32 load(const uint16_t* p) { return from_fp16(load_as<U16>(p)); }
  static SHOESTRING_METHOD void store(uint16_t* p, F32 x) {
    U16 y = to_fp16(x);
    __builtin_memcpy(p, &y, sizeof y);
  }
};

struct Math {
  static SHOESTRING_METHOD F32 sqrt(F32 x) { return cpu::SHOESTRING_CAPABILITY::sqrt(x); }
  static SHOESTRING_METHOD F32 divide(F32 a, F32 b) { return a / b; }
  static SHOESTRING_METHOD F32 fma(F32 a, float b, F32 c) { return cpu::SHOESTRING_CAPABILITY::fma(a, splat(b), c); }
  static SHOESTRING_METHOD F32 sign(F32 x) {  // zero and NaN are their own
    F32 one = as_float((as_bits(x) & 0x80000000u) | as_bits(splat(1.f)));
    return abs(x) > 0 ? one : x;
  }
};

// A moment of one block: read and written a vector at a time, then measured, then encoded.
struct FloatMoment {
  float* values;

  SHOESTRING_METHOD F32 read(int64_t i) const { return load(values + i); }
  SHOESTRING_METHOD void write(int64_t i, F32 x) { store(values + i, x); }
  SHOESTRING_METHOD void measure() const {}
  SHOESTRING_METHOD void encode() const {}
};

template <bool kSigned>
struct CodedMoment {
  uint8_t* codes;
  float* scale;
  float* values;  // room for a block
  Decoder<kSigned> decode;
  I32 most;

  SHOESTRING_METHOD CodedMoment(uint8_t* its_codes, float* its_scale, float* room)
      : codes(its_codes), scale(its_scale), values(room), decode(*its_scale), most{} {}

  SHOESTRING_METHOD F32 read(int64_t i) const { return decode(codes + i); }
  SHOESTRING_METHOD void write(int64_t i, F32 x) {
    store(values + i, x);
    most = larger(most, x);
  }
  SHOESTRING_METHOD void measure() const { *scale = largest(most); }
  SHOESTRING_METHOD void encode() const { Encoder<kSigned>()(values, *scale, codes); }
};

template <class Weight, class Rule, class... Moments>
SHOESTRING_INLINE void step_block(const Rule rule, typename Weight::Type* param, const typename Weight::Type* grad,
                                  Moments... moments) {
  for (int64_t i = 0; i < kStateBlock; i += kLanes) {
    F32 values[] = {moments.read(i)...};
    F32 p = Weight::load(param + i);
    rule(p, Weight::load(grad + i), values, Math());
    Weight::store(param + i, p);
    int k = 0;
    (moments.write(i, values[k++]), ...);
  }
  (moments.measure(), ...);  // all of them first: a scale takes long to come, and encoding the last one would wait
  (moments.encode(), ...);
}

template <class Weight, class Rule, int... k>
void step_coded(const OptimizerTensor<Rule>& t, int64_t block, typename Weight::Type* param,
                const typename Weight::Type* grad, std::integer_sequence<int, k...>) {
  alignas(kBytes) float room[Rule::kMoments][kStateBlock];
  const int64_t begin = block * kStateBlock, left = t.count - begin;
  uint8_t* codes[] = {static_cast<uint8_t*>(t.moment[k]) + begin...};
  if (left < kStateBlock) {  // what lies past the end is zero whatever its codes are
    (__builtin_memset(codes[k] + left, Rule::kSigned[k] ? 127 : 0, kStateBlock - left), ...);
  }
  step_block<Weight>(t.rule, param, grad, CodedMoment<Rule::kSigned[k]>(codes[k], t.scale[k] + block, room[k])...);
}

template <class Weight, class Rule, int... k>
void step_float(const OptimizerTensor<Rule>& t, int64_t block, typename Weight::Type* param,
                const typename Weight::Type* grad, std::integer_sequence<int, k...>) {
  step_block<Weight>(t.rule, param, grad, FloatMoment{static_cast<float*>(t.moment[k]) + block * kStateBlock}...);
}

template <class Weight, class Rule>
void step_blocks(const OptimizerTensor<Rule>& t, int64_t first, int64_t last) {
  using T = typename Weight::Type;
  constexpr std::make_integer_sequence<int, Rule::kMoments> kAll;
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * kStateBlock, count = t.count - begin < kStateBlock ? t.count - begin : kStateBlock;
    T* param = static_cast<T*>(t.param) + begin;
    const T* grad = static_cast<const T*>(t.grad) + begin;
    T padded_param[kStateBlock], padded_grad[kStateBlock];
    const bool whole = count == kStateBlock;
    if (!whole) {  // the last block of a tensor is filled up with zeros, which change no scale
      __builtin_memset(padded_param, 0, sizeof padded_param);
      __builtin_memset(padded_grad, 0, sizeof padded_grad);
      __builtin_memcpy(padded_param, param, count * sizeof(T));
      __builtin_memcpy(padded_grad, grad, count * sizeof(T));
    }
    T* p = whole ? param : padded_param;
    const T* g = whole ? grad : padded_grad;
    if (t.scale[0] == nullptr) {
      step_float<Weight>(t, block, p, g, kAll);
    } else {
      step_coded<Weight>(t, block, p, g, kAll);
    }
    if (!whole) __builtin_memcpy(param, padded_param, count * sizeof(T));
  }
}

template <class Rule>
void step(const OptimizerTensor<Rule>& t, int64_t first, int64_t last) {
  switch (t.type) {
    case WeightType::kFloat: return step_blocks<Float>(t, first, last);
    case WeightType::kBFloat16: return step_blocks<BFloat16>(t, first, last);
    case WeightType::kHalf: return step_blocks<Half>(t, first, last);
  }
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
