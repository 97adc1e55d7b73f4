#pragma once

// The CPU kernel of the optimizers, for any update rule. It processes blocks of 256 elements in three loops.
// The first loop decodes the moments of a block, updates them, and keeps them in the first-level cache (1 KiB
// per moment). The second loop computes the new scales from the largest magnitudes, and the third loop
// encodes the moments. Three short loops keep more instructions in flight than one long chain of dependent
// instructions would. If weights and gradients are both fp32 or both bf16, the first loop reads and writes
// them directly. Other types, and the last block of a tensor, go through fp32 copies of the block.

#include <type_traits>
#include <utility>

#include "optim/weights_simd.h"
#include "quantization/dynamic_map_simd.h"
#include "quantization/map_4bit_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::OptimizerArenas;
using kernels::OptimizerTensor;
using kernels::Rounding;
using kernels::StateType;

struct Math {
  static SHOESTRING_METHOD F32 sqrt(F32 x) { return cpu::SHOESTRING_CAPABILITY::sqrt(x); }
  static SHOESTRING_METHOD F32 divide(F32 a, F32 b) { return a / b; }
  static SHOESTRING_METHOD F32 fma(F32 a, float b, F32 c) {
    return cpu::SHOESTRING_CAPABILITY::fma(a, splat(b), c);
  }
  // Returns the sign of each element, 1 or -1. Zero and NaN are returned unchanged.
  static SHOESTRING_METHOD F32 sign(F32 x) {
    F32 one = as_float((as_bits(x) & 0x80000000u) | as_bits(splat(1.f)));
    return abs(x) > 0 ? one : x;
  }
};

// The position of one block of 256 elements, and the seed of the block's random bits.
struct Block {
  uint64_t seed;
  uint32_t step, number;
  int64_t own;   // index of the block in its parameter
  int64_t at;    // index of the block in the arenas
  int64_t left;  // number of elements from the block's start to the tensor's end

  void random(uint32_t stream, uint16_t* bits) const {
    random_block(seed, step, kernels::stream_word(number, stream), own, bits);
  }
};

// One moment of a block of 256 elements. read() and write() process one SIMD vector. After the last write(),
// measure() computes the block's scale, and encode() computes the codes.
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
  U32 most;

  SHOESTRING_METHOD Moment(const Block& block, void* arena, float* scales, int, float)
      : codes(static_cast<uint8_t*>(arena) + block.at * kStateBlock), scale(scales + block.at),
        decode(*scale), most{} {
    // In the last block of a moment, elements past the tensor's end must read as zero, whatever their codes
    // are. Their codes are therefore set to the code of zero.
    if (block.left < kStateBlock)
      __builtin_memset(codes + block.left, kSigned ? 127 : 0, kStateBlock - block.left);
  }
  SHOESTRING_METHOD F32 read(int64_t i) const { return decode(codes + i); }
  SHOESTRING_METHOD void write(int64_t i, F32 x) {
    store(values + i, x);
    most = larger<kSigned>(most, x);
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
        scales(all_scales + block.at * kScales4<kSigned>), left(block.left), decode(codes, scales),
        encoder(kernels::rounding_4bit(kSigned, keeps, block.step)) {}
  SHOESTRING_METHOD F32 read(int64_t i) const {
    F32 x = decode(i);
    // In the last block of a moment, elements past the tensor's end must read as zero, whatever their codes
    // are.
    if (__builtin_expect(left < kStateBlock, 0)) {
      for (int lane = 0; lane < kLanes; ++lane) x[lane] = i + lane < left ? x[lane] : 0;
    }
    return x;
  }
  SHOESTRING_METHOD void write(int64_t i, F32 x) { store(values + i, x); }
  SHOESTRING_METHOD void measure() const {}
  SHOESTRING_METHOD void encode() { encoder(values, scales, codes); }
};

// The weights of a block. load() reads one SIMD vector, and store() writes two SIMD vectors.
template <class Element>
struct Plain {
  using Type = typename Element::Type;
  Type* weights;

  SHOESTRING_METHOD Plain(Type* weights, const Block&, int16_t*) : weights(weights) {}
  static SHOESTRING_METHOD F32 grad(const Type* p) { return Element::load(p); }
  SHOESTRING_METHOD F32 load(int64_t i) const { return Element::load(weights + i); }
  SHOESTRING_METHOD void store(int64_t i, F32 x, F32 y) { Element::store(weights + i, x, y); }
};

struct Stochastic : Plain<BFloat16> {
  uint16_t random[kStateBlock];

  SHOESTRING_METHOD Stochastic(uint16_t* weights, const Block& block, int16_t*)
      : Plain(weights, block, nullptr) {
    block.random(kernels::kWeightStream, random);
  }
  SHOESTRING_METHOD void store(int64_t i, F32 x, F32 y) {
    store_upper_halves(weights + i, rounded_bf16(x, random + i), rounded_bf16(y, random + i + kLanes));
  }
};

struct Remainder : Plain<BFloat16> {
  uint16_t* remainder;

  SHOESTRING_METHOD Remainder(uint16_t* weights, const Block& block, int16_t* arena)
      : Plain(weights, block, nullptr),
        remainder(reinterpret_cast<uint16_t*>(arena) + block.at * kStateBlock) {}
  SHOESTRING_METHOD F32 load(int64_t i) const {
    return join(load_as<U16>(weights + i), load_as<U16>(remainder + i));
  }
  SHOESTRING_METHOD void store(int64_t i, F32 x, F32 y) {
    split(x, weights + i, remainder + i);
    split(y, weights + i + kLanes, remainder + i + kLanes);
  }
};

template <class Weights, class Rule, class... Moments>
SHOESTRING_INLINE void update_block(const Rule& shared, Weights weights, const typename Weights::Type* grad,
                                    Moments&&... moments) {
  // A local copy of the rule stays in registers: the compiler knows that stores to weights and moments cannot
  // modify it.
  const Rule rule = shared;
  for (int64_t i = 0; i < kStateBlock; i += 2 * kLanes) {
    F32 p[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const int64_t at = i + j * kLanes;
      F32 values[kernels::at_least_one(Rule::kMoments)] = {moments.read(at)...};
      p[j] = weights.load(at);
      rule(p[j], Weights::grad(grad + at), values, Math());
      int k = 0;
      (moments.write(at, values[k++]), ...);
    }
    weights.store(i, p[0], p[1]);
  }
  // The scales of all moments are computed before any moment is encoded. Encoding a moment right after
  // computing its scale would wait for the scale's long latency.
  (moments.measure(), ...);
  (moments.encode(), ...);
}

template <StateType kState, class Weights, class Rule, int... k>
SHOESTRING_INLINE void update_block(const OptimizerTensor<Rule>& t, const OptimizerArenas<Rule::kMoments>& a,
                                    const Block& block, typename Weights::Type* param,
                                    const typename Weights::Type* grad, std::integer_sequence<int, k...>) {
  using Long = kernels::LongMoments<Rule>;
  update_block(t.rule, Weights(param, block, a.remainder), grad,
               Moment<kernels::state_of_moment(kState, Long::has(k)), Rule::kSigned[k]>(
                   block, a.moment[k], a.scale[k], k, t.rule.keeps(k))...);
}

// Copies the gradient of a block to fp32, adds the accumulated gradient, and clears the latter. The function
// is not inlined, because the steps of all states and weights share it, and each copy takes long to compile.
template <class Rule>
__attribute__((noinline)) void copy_gradient(const OptimizerTensor<Rule>& t,
                                             const OptimizerArenas<Rule::kMoments>& a, const Block& block,
                                             int64_t count, float* grad) {
  load_elements(t.grad_type, element(t.grad, t.grad_type, block.own * kStateBlock), count, grad);
  if (a.accumulated == nullptr) return;
  void* sum = element(a.accumulated, a.accumulated_type, block.at * kStateBlock);
  load_elements<true>(a.accumulated_type, sum, count, grad);
  __builtin_memset(sum, 0, kStateBlock * size_of(a.accumulated_type));
}

// Updates a block in the fp32 copies of its weights and gradients. The steps of all weights share this
// function.
template <StateType kState, class Rule>
__attribute__((noinline)) void update_copies(const OptimizerTensor<Rule>& t,
                                             const OptimizerArenas<Rule::kMoments>& a, const Block& block,
                                             float* param, const float* grad) {
  constexpr std::make_integer_sequence<int, Rule::kMoments> kAll;
  update_block<kState, Plain<Float>>(t, a, block, param, grad, kAll);
}

// Steps one block through fp32 copies of its weights and gradients, which may have any dtype and rounding
// mode.
template <StateType kState, class Weights, class Rule>
void step_copied(const OptimizerTensor<Rule>& t, const OptimizerArenas<Rule::kMoments>& a,
                 const Block& block) {
  alignas(kBytes) float param[kStateBlock], grad[kStateBlock];
  typename Weights::Type own[kStateBlock] = {};
  const int64_t count = block.left < kStateBlock ? block.left : kStateBlock;
  auto* weights = static_cast<typename Weights::Type*>(t.param) + block.own * kStateBlock;

  copy_gradient(t, a, block, count, grad);
  __builtin_memcpy(own, weights, count * sizeof *own);
  Weights w(own, block, a.remainder);
  for (int64_t i = 0; i < kStateBlock; i += kLanes) store(param + i, w.load(i));
  update_copies<kState>(t, a, block, param, grad);
  for (int64_t i = 0; i < kStateBlock; i += 2 * kLanes) w.store(i, load(param + i), load(param + i + kLanes));
  __builtin_memcpy(weights, own, count * sizeof *own);
}

// Number of bytes of weights by which prefetches run ahead of the block that is stepped.
constexpr int64_t kAheadBytes = 2048;

// Prefetches `bytes` of memory, starting at block `block` of an array with so many bytes per block.
SHOESTRING_INLINE void prefetch_block(const void* array, int64_t block, int64_t bytes) {
  if (array == nullptr) return;
  const char* from = static_cast<const char*>(array);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(address(from, block * bytes + i), 0, 3);
}

// Prefetches what a block of a step with codes reads. The step reads several arrays, each for a few hundred
// bytes, so the CPU's own prefetcher restarts in each page of each array, and the computation would wait for
// memory. A step without codes computes so little that memory is busy all the time, and prefetches delay it.
template <StateType kState, class Rule>
SHOESTRING_INLINE void prefetch_blocks(const OptimizerTensor<Rule>& t,
                                       const OptimizerArenas<Rule::kMoments>& a, int64_t block) {
  prefetch_block(t.param, block, kStateBlock * size_of(t.type));
  prefetch_block(t.grad, block, kStateBlock * size_of(t.grad_type));
  for (int k = 0; k < Rule::kMoments; ++k) {
    const StateType state = kernels::state_of_moment(kState, kernels::LongMoments<Rule>::has(k));
    prefetch_block(a.moment[k], t.block + block,
                   state == StateType::kBFloat16 ? kStateBlock * 2
                   : state == StateType::k8Bit   ? kStateBlock
                                                 : kernels::kBlockBytes4);
  }
  prefetch_block(a.remainder, t.block + block, kStateBlock * 2);
  prefetch_block(a.accumulated, t.block + block, kStateBlock * size_of(a.accumulated_type));
}

template <StateType kState, class Weights, bool kDirect, class Rule>
void step_blocks(const OptimizerTensor<Rule>& t, const OptimizerArenas<Rule::kMoments>& a, int64_t first,
                 int64_t last) {
  constexpr std::make_integer_sequence<int, Rule::kMoments> kAll;
  const bool direct = kDirect && t.grad_type == t.type && a.accumulated == nullptr;
  [[maybe_unused]] const int64_t ahead = kAheadBytes / (kStateBlock * size_of(t.type));
  for (int64_t i = first; i < last; ++i) {
    if constexpr (kState == StateType::k8Bit || kState == StateType::k4Bit) {
      if (i + ahead < last) prefetch_blocks<kState>(t, a, i + ahead);
    }
    const int64_t begin = i * kStateBlock;
    const Block block{a.seed, t.step, t.number, i, t.block + i, t.count - begin};
    if constexpr (kDirect) {
      if (direct && block.left >= kStateBlock) {
        using Type = typename Weights::Type;
        update_block<kState, Weights>(t, a, block, static_cast<Type*>(t.param) + begin,
                                      static_cast<const Type*>(t.grad) + begin, kAll);
        continue;
      }
    }
    step_copied<kState, Weights>(t, a, block);
  }
}

template <StateType kState, class Rule>
void step_state(const OptimizerTensor<Rule>& t, const OptimizerArenas<Rule::kMoments>& a, int64_t first,
                int64_t last) {
  if (t.type == ElementType::kFloat) return step_blocks<kState, Plain<Float>, true>(t, a, first, last);
  if (t.type == ElementType::kHalf) return step_blocks<kState, Plain<Half>, false>(t, a, first, last);
  switch (a.rounding) {
    case Rounding::kNearest:
      return step_blocks<kState, Plain<BFloat16>, true>(t, a, first, last);
    case Rounding::kStochastic:
      return step_blocks<kState, Stochastic, true>(t, a, first, last);
    case Rounding::kRemainder:
      return step_blocks<kState, Remainder, true>(t, a, first, last);
  }
}

template <class Rule>
void step(const OptimizerTensor<Rule>& t, const OptimizerArenas<Rule::kMoments>& a, int64_t first,
          int64_t last) {
  switch (a.type) {
    case StateType::kFloat:
      return step_state<StateType::kFloat>(t, a, first, last);
    case StateType::kBFloat16:
      return step_state<StateType::kBFloat16>(t, a, first, last);
    case StateType::k8Bit:
      return step_state<StateType::k8Bit>(t, a, first, last);
    case StateType::k4Bit:
      return step_state<StateType::k4Bit>(t, a, first, last);
  }
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
