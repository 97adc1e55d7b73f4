#pragma once

// A block's moments are decoded, updated and left in the first-level cache, 1 KiB each, where their largest magnitudes
// become the new scales; encoding reads them from there. Three short loops keep more work in flight than one long
// chain of dependent instructions would. Weights and gradients of one type, fp32 or bf16, are read and written in the
// same pass; all other kinds go through fp32 copies of the block.

#include <type_traits>
#include <utility>

#include "cpu/dynamic_map.h"
#include "cpu/map_4bit.h"
#include "cpu/weights.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::OptimizerArenas;
using kernels::OptimizerTensor;
using kernels::Rounding;
using kernels::StateType;

struct Math {
  static SHOESTRING_METHOD F32 sqrt(F32 x) { return cpu::SHOESTRING_CAPABILITY::sqrt(x); }
  static SHOESTRING_METHOD F32 divide(F32 a, F32 b) { return a / b; }
  static SHOESTRING_METHOD F32 fma(F32 a, float b, F32 c) { return cpu::SHOESTRING_CAPABILITY::fma(a, splat(b), c); }
  static SHOESTRING_METHOD F32 sign(F32 x) {  // zero and NaN are their own
    F32 one = as_float((as_bits(x) & 0x80000000u) | as_bits(splat(1.f)));
    return abs(x) > 0 ? one : x;
  }
};

// A block of a call: what its moments are made from.
struct Block {
  uint64_t seed;
  uint32_t step, number;
  int64_t own;   // among those of its parameter
  int64_t at;    // in the arenas
  int64_t left;  // elements up to the tensor's end

  void random(uint32_t stream, uint16_t* bits) const {
    random_block(seed, step, kernels::stream_word(number, stream), own, bits);
  }
};

// A moment of one block: read and written a vector at a time, then measured, then encoded.
template <StateType kState, bool kSigned>
struct Moment;

template <bool kSigned>
struct Moment<StateType::kFloat, kSigned> {
  float* values;

  SHOESTRING_METHOD Moment(const Block& block, void* arena, float*, int, float)
      : values(static_cast<float*>(arena) + block.at * kStateBlock) {}
  SHOESTRING_METHOD F32 read(int64_t i) const { return load(values + i); }
  SHOESTRING_METHOD void write(int64_t i, F32 x) { store(values + i, x); }
  SHOESTRING_METHOD void measure() const {}
  SHOESTRING_METHOD void encode() const {}
};

template <bool kSigned>
struct Moment<StateType::kBFloat16, kSigned> {
  uint16_t* values;
  uint16_t random[kStateBlock];

  SHOESTRING_METHOD Moment(const Block& block, void* arena, float*, int index, float)
      : values(static_cast<uint16_t*>(arena) + block.at * kStateBlock) {
    block.random(kernels::kMomentStream + index, random);
  }
  SHOESTRING_METHOD F32 read(int64_t i) const { return BFloat16::load(values + i); }
  SHOESTRING_METHOD void write(int64_t i, F32 x) {
    U16 y = to_bf16(x, random + i);
    __builtin_memcpy(values + i, &y, sizeof y);
  }
  SHOESTRING_METHOD void measure() const {}
  SHOESTRING_METHOD void encode() const {}
};

template <bool kSigned>
struct Moment<StateType::k8Bit, kSigned> {
  uint8_t* codes;
  float* scale;
  alignas(kBytes) float values[kStateBlock];
  Decoder<kSigned> decode;
  I32 most;

  SHOESTRING_METHOD Moment(const Block& block, void* arena, float* scales, int, float)
      : codes(static_cast<uint8_t*>(arena) + block.at * kStateBlock), scale(scales + block.at), decode(*scale), most{} {
    // What lies past the end is zero whatever its codes are.
    if (block.left < kStateBlock) __builtin_memset(codes + block.left, kSigned ? 127 : 0, kStateBlock - block.left);
  }
  SHOESTRING_METHOD F32 read(int64_t i) const { return decode(codes + i); }
  SHOESTRING_METHOD void write(int64_t i, F32 x) {
    store(values + i, x);
    most = larger(most, x);
  }
  SHOESTRING_METHOD void measure() const { *scale = largest(most); }
  SHOESTRING_METHOD void encode() { Encoder<kSigned>()(values, *scale, codes); }
};

template <bool kSigned>
struct Moment<StateType::k4Bit, kSigned> {
  uint8_t* codes;
  float* scales;
  int64_t left;
  Decoder4<kSigned> decode;
  Encoder4<kSigned> encoder;
  alignas(kBytes) float values[kStateBlock];

  SHOESTRING_METHOD Moment(const Block& block, void* arena, float* all_scales, int, float keeps)
      : codes(static_cast<uint8_t*>(arena) + block.at * kernels::kBlockBytes4),
        scales(all_scales + block.at * kScales4<kSigned>),
        left(block.left),
        decode(codes, scales),
        encoder(kernels::rounding_4bit(kSigned, keeps, block.step)) {}
  SHOESTRING_METHOD F32 read(int64_t i) const {
    F32 x = decode(i);
    if (__builtin_expect(left < kStateBlock, 0)) {  // what lies past the end is zero whatever its codes are
      for (int lane = 0; lane < kLanes; ++lane) x[lane] = i + lane < left ? x[lane] : 0;
    }
    return x;
  }
  SHOESTRING_METHOD void write(int64_t i, F32 x) { store(values + i, x); }
  SHOESTRING_METHOD void measure() const {}
  SHOESTRING_METHOD void encode() { encoder(values, scales, codes); }
};

template <class Element, class Rule, class... Moments>
SHOESTRING_INLINE void update_block(const Rule& shared, typename Element::Type* param,
                                    const typename Element::Type* grad, Moments&&... moments) {
  const Rule rule = shared;  // in registers: nothing that is stored could be a part of it
  for (int64_t i = 0; i < kStateBlock; i += kLanes) {
    F32 values[kernels::at_least_one(Rule::kMoments)] = {moments.read(i)...};
    F32 p = Element::load(param + i);
    rule(p, Element::load(grad + i), values, Math());
    Element::store(param + i, p);
    int k = 0;
    (moments.write(i, values[k++]), ...);
  }
  (moments.measure(), ...);  // all of them first: a scale takes long to come, and encoding the last one would wait
  (moments.encode(), ...);
}

template <StateType kState, class Element, class Rule, int... k>
SHOESTRING_INLINE void update_block(const OptimizerTensor<Rule>& t, const OptimizerArenas<Rule::kMoments>& a,
                                    const Block& block, typename Element::Type* param,
                                    const typename Element::Type* grad, std::integer_sequence<int, k...>) {
  update_block<Element>(t.rule, param, grad, Moment<kState, Rule::kSigned[k]>(block, a.moment[k], a.scale[k], k, t.rule.keeps(k))...);
}

// Block by block: the weights and gradients of any type and rounding, through fp32.
template <StateType kState, class Rule>
void step_copied(const OptimizerTensor<Rule>& t, const OptimizerArenas<Rule::kMoments>& a, const Block& block) {
  constexpr std::make_integer_sequence<int, Rule::kMoments> kAll;
  alignas(kBytes) float param[kStateBlock], grad[kStateBlock];
  const int64_t begin = block.own * kStateBlock, arena = block.at * kStateBlock;
  const int64_t count = block.left < kStateBlock ? block.left : kStateBlock;
  const bool rounds = t.type == ElementType::kBFloat16;
  uint16_t* remainder = rounds && a.rounding == Rounding::kRemainder ? (uint16_t*)a.remainder + arena : nullptr;
  void* weights = element(t.param, t.type, begin);

  load_elements(t.grad_type, element(t.grad, t.grad_type, begin), count, grad);
  if (a.accumulated != nullptr) {
    void* sum = element(a.accumulated, a.accumulated_type, arena);
    load_elements<true>(a.accumulated_type, sum, count, grad);
    __builtin_memset(sum, 0, kStateBlock * size_of(a.accumulated_type));
  }
  load_elements(t.type, weights, count, param);
  if (remainder != nullptr) {
    for (int64_t i = 0; i < kStateBlock; i += kLanes) {
      store(param + i, join(to_bf16(load(param + i)), load_as<U16>(remainder + i)));
    }
  }
  update_block<kState, Float>(t, a, block, param, grad, kAll);

  alignas(kBytes) uint16_t narrow[kStateBlock];
  const void* result = t.type == ElementType::kFloat ? static_cast<const void*>(param) : narrow;
  if (remainder != nullptr) {
    for (int64_t i = 0; i < kStateBlock; i += kLanes) split(load(param + i), narrow + i, remainder + i);
  } else if (rounds && a.rounding == Rounding::kStochastic) {
    uint16_t random[kStateBlock];
    block.random(kernels::kWeightStream, random);
    for (int64_t i = 0; i < kStateBlock; i += kLanes) {
      U16 y = to_bf16(load(param + i), random + i);
      __builtin_memcpy(narrow + i, &y, sizeof y);
    }
  } else if (t.type == ElementType::kBFloat16) {
    for (int64_t i = 0; i < kStateBlock; i += kLanes) BFloat16::store(narrow + i, load(param + i));
  } else if (t.type == ElementType::kHalf) {
    for (int64_t i = 0; i < kStateBlock; i += kLanes) Half::store(narrow + i, load(param + i));
  }
  __builtin_memcpy(weights, result, count * size_of(t.type));
}

template <StateType kState, class Rule>
void step_blocks(const OptimizerTensor<Rule>& t, const OptimizerArenas<Rule::kMoments>& a, int64_t first,
                 int64_t last) {
  constexpr std::make_integer_sequence<int, Rule::kMoments> kAll;
  const bool direct = t.grad_type == t.type && a.accumulated == nullptr;
  const bool is_bf16 = t.type == ElementType::kBFloat16 && a.rounding == Rounding::kNearest;
  for (int64_t i = first; i < last; ++i) {
    const int64_t begin = i * kStateBlock, at = t.block + i;
    const Block block{a.seed, t.step, t.number, i, at, t.count - begin};
    if (direct && block.left >= kStateBlock && t.type == ElementType::kFloat) {
      update_block<kState, Float>(t, a, block, static_cast<float*>(t.param) + begin,
                                  static_cast<const float*>(t.grad) + begin, kAll);
    } else if (direct && block.left >= kStateBlock && is_bf16) {
      update_block<kState, BFloat16>(t, a, block, static_cast<uint16_t*>(t.param) + begin,
                                     static_cast<const uint16_t*>(t.grad) + begin, kAll);
    } else {
      step_copied<kState>(t, a, block);
    }
  }
}

template <class Rule>
void step(const OptimizerTensor<Rule>& t, const OptimizerArenas<Rule::kMoments>& a, int64_t first, int64_t last) {
  switch (a.type) {
    case StateType::kFloat: return step_blocks<StateType::kFloat>(t, a, first, last);
    case StateType::kBFloat16: return step_blocks<StateType::kBFloat16>(t, a, first, last);
    case StateType::k8Bit: return step_blocks<StateType::k8Bit>(t, a, first, last);
    case StateType::k4Bit: return step_blocks<StateType::k4Bit>(t, a, first, last);
  }
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
