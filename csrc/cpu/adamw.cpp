// A block's moments are decoded, updated and left in 2 KiB of the first-level cache, where their largest magnitudes
// become the new scales; encoding reads them from there. Three short loops keep more work in flight than one long
// chain of dependent instructions would.

#include "kernels/adamw.h"

#include "cpu/dynamic_map.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::AdamWRule;
using kernels::AdamWTensor;
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

// The largest magnitude as an integer: the order of fp32 bits, in which NaN is above infinity and so not lost.
SHOESTRING_INLINE I32 larger(I32 most, F32 x) {
  I32 bits = (I32)as_bits(abs(x));
  return bits > most ? bits : most;
}
SHOESTRING_INLINE float largest(I32 most) {
  int32_t lanes[kLanes], top = 0;
  __builtin_memcpy(lanes, &most, sizeof most);
  for (int i = 0; i < kLanes; ++i) top = lanes[i] > top ? lanes[i] : top;
  float x;
  __builtin_memcpy(&x, &top, sizeof x);
  return x;
}

struct Math {
  static SHOESTRING_METHOD F32 sqrt(F32 x) { return cpu::SHOESTRING_CAPABILITY::sqrt(x); }
  static SHOESTRING_METHOD F32 divide(F32 a, F32 b) { return a / b; }
};

template <class Weight>
SHOESTRING_INLINE void update(const AdamWRule& rule, typename Weight::Type* param, const typename Weight::Type* grad,
                              F32& m, F32& v) {
  F32 p = Weight::load(param);
  rule(p, Weight::load(grad), m, v, Math());
  Weight::store(param, p);
}

template <class Weight>
void block_float(AdamWRule rule, typename Weight::Type* param, const typename Weight::Type* grad, float* exp_avg,
                 float* exp_avg_sq) {
  for (int64_t i = 0; i < kStateBlock; i += kLanes) {
    F32 m = load(exp_avg + i), v = load(exp_avg_sq + i);
    update<Weight>(rule, param + i, grad + i, m, v);
    store(exp_avg + i, m);
    store(exp_avg_sq + i, v);
  }
}

template <class Weight>
void block_8bit(AdamWRule rule, typename Weight::Type* param, const typename Weight::Type* grad,
                uint8_t* exp_avg, uint8_t* exp_avg_sq, float& exp_avg_scale, float& exp_avg_sq_scale) {
  alignas(kBytes) float m_block[kStateBlock], v_block[kStateBlock];
  const Decoder<true> decode_m(exp_avg_scale);
  const Decoder<false> decode_v(exp_avg_sq_scale);
  I32 most_m{}, most_v{};
  for (int64_t i = 0; i < kStateBlock; i += kLanes) {
    F32 m = decode_m(exp_avg + i), v = decode_v(exp_avg_sq + i);
    update<Weight>(rule, param + i, grad + i, m, v);
    store(m_block + i, m);
    store(v_block + i, v);
    most_m = larger(most_m, m);
    most_v = larger(most_v, v);
  }
  exp_avg_scale = largest(most_m);
  exp_avg_sq_scale = largest(most_v);
  Encoder<true>()(m_block, exp_avg_scale, exp_avg);
  Encoder<false>()(v_block, exp_avg_sq_scale, exp_avg_sq);
}

template <class Weight>
void step(const AdamWTensor& t, int64_t first, int64_t last) {
  using T = typename Weight::Type;
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * kStateBlock, count = t.count - begin < kStateBlock ? t.count - begin : kStateBlock;
    T* param = static_cast<T*>(t.param) + begin;
    const T* grad = static_cast<const T*>(t.grad) + begin;
    T padded_param[kStateBlock], padded_grad[kStateBlock];
    const bool whole = count == kStateBlock;
    if (!whole) {  // the last block of a tensor is filled up with zeros, which change neither scale
      __builtin_memset(padded_param, 0, sizeof padded_param);
      __builtin_memset(padded_grad, 0, sizeof padded_grad);
      __builtin_memcpy(padded_param, param, count * sizeof(T));
      __builtin_memcpy(padded_grad, grad, count * sizeof(T));
    }
    T* p = whole ? param : padded_param;
    const T* g = whole ? grad : padded_grad;
    if (t.exp_avg_scale == nullptr) {
      block_float<Weight>(t.rule, p, g, static_cast<float*>(t.exp_avg) + begin,
                          static_cast<float*>(t.exp_avg_sq) + begin);
    } else {
      uint8_t* m = static_cast<uint8_t*>(t.exp_avg) + begin;
      uint8_t* v = static_cast<uint8_t*>(t.exp_avg_sq) + begin;
      if (!whole) {
        __builtin_memset(m + count, 127, kStateBlock - count);
        __builtin_memset(v + count, 0, kStateBlock - count);
      }
      block_8bit<Weight>(t.rule, p, g, m, v, t.exp_avg_scale[block], t.exp_avg_sq_scale[block]);
    }
    if (!whole) __builtin_memcpy(param, padded_param, count * sizeof(T));
  }
}

void step_any(const AdamWTensor& t, int64_t first, int64_t last) {
  switch (t.type) {
    case WeightType::kFloat: return step<Float>(t, first, last);
    case WeightType::kBFloat16: return step<BFloat16>(t, first, last);
    case WeightType::kHalf: return step<Half>(t, first, last);
  }
}

void quantize(const float* x, int64_t n, bool is_signed, uint8_t* codes, float* scale) {
  for (int64_t begin = 0; begin < n; begin += kStateBlock) {
    const int64_t count = n - begin < kStateBlock ? n - begin : kStateBlock;
    alignas(kBytes) float block[kStateBlock] = {};
    uint8_t out[kStateBlock];
    __builtin_memcpy(block, x + begin, count * sizeof(float));
    I32 most{};
    for (int64_t i = 0; i < kStateBlock; i += kLanes) most = larger(most, load(block + i));
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

extern const kernels::AdamWTable adamw;
const kernels::AdamWTable adamw{step_any, quantize, dequantize};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
