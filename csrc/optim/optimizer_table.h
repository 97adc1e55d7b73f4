#pragma once

// What the optimizers share: parameters, their moments in flat arenas, and a rule.
//
// A rule is a struct of one step's numbers with
//   kMoments, kSigned[kMoments]  how many moments it keeps, and which may be negative (their map of codes)
//   kLong[kMoments]  where it has it: which of them, not all, change in a step by less than codes are apart
//   operator()(V& param, V grad, V (&moments)[kMoments], math)  for one element, or one vector of elements;
//                                math has sqrt, divide, sign, and fma(vector, number, vector), because where
//                                a sum has two products compilers do not agree on which one is fused
//   keeps(k)                     how much of moment k stays in a step
//   for_codes(scales)            turns it into the same for moments in units of these, and for math that is
//   not exact Options                      StepOptions and more, with rule(step): the rule of step number
//   `step`, from one on
// The kernels of every device share it.

#include <math.h>

#include <cstdint>
#include <type_traits>

#include "core/capability.h"
#include "core/host_device.h"
#include "quantization/dynamic_map.h"
#include "quantization/map_4bit.h"

namespace shoestring::kernels {

enum class ElementType : uint8_t { kFloat, kBFloat16, kHalf };

// How moments are kept: fp32, bf16 rounded stochastically (to nearest, a second moment could not decay), or
// codes with scales.
enum class StateType : uint8_t { kFloat, kBFloat16, k8Bit, k4Bit };

// Rule::kLong, and false where there is none.
template <class Rule, class = void>
struct LongMoments {
  static constexpr bool has(int) { return false; }
};
template <class Rule>
struct LongMoments<Rule, std::void_t<decltype(Rule::kLong)>> {
  static constexpr bool has(int k) { return Rule::kLong[k]; }
};

// How a moment of arenas is kept: a long one would stand still as codes.
constexpr StateType state_of_moment(StateType state, bool is_long) {
  const bool has_codes = state == StateType::k8Bit || state == StateType::k4Bit;
  return is_long && has_codes ? StateType::kBFloat16 : state;
}

// Of a block of kStateBlock elements.
constexpr int64_t scales_per_block(StateType state, bool is_signed) {
  if (state == StateType::k4Bit) return is_signed ? kScales4<true> : kScales4<false>;
  return state == StateType::k8Bit ? 1 : 0;
}

// How the 4-bit codes of a moment are rounded (quantization/map_4bit.h).
SHOESTRING_HOST_DEVICE Rounding4 rounding_4bit(bool is_signed, float keeps, uint32_t step) {
  return !is_signed || keeps > 0.93f ? dithered4(step) : Rounding4{};
}

// How a bf16 weight takes an update; fp32 and fp16 weights are rounded to nearest.
enum class Rounding : uint8_t {
  kNearest,
  kStochastic,  // up or down, so that the mean is right
  kRemainder,   // weight and 16 more bits are an fp32: the weight in the upper half rounded, halves away from
                // zero
};

// A step's numbers, of any rule. Those behind pointers are one fp32 each, in the memory of the device that
// steps; null: none.
struct StepOptions {
  double lr, weight_decay;
  bool maximize;
  const float* lr_tensor = nullptr;   // in place of lr
  const float* grad_scale = nullptr;  // gradients are divided by it
  const float* clip_coef = nullptr;   // and multiplied by it
  const float* found_inf = nullptr;   // the step is skipped where it is not zero

  SHOESTRING_HOST_DEVICE bool skips() const { return found_inf != nullptr && *found_inf != 0; }
  SHOESTRING_HOST_DEVICE double rate() const { return lr_tensor != nullptr ? *lr_tensor : lr; }

  // What gradients are multiplied by, but for the sign.
  SHOESTRING_HOST_DEVICE double factor() const {
    const double clip = clip_coef != nullptr ? *clip_coef : 1.0;
    return grad_scale != nullptr ? clip / *grad_scale : clip;
  }
};

constexpr int at_least_one(int n) { return n > 1 ? n : 1; }  // for arrays, which cannot be empty

// Arenas: one for all parameters of a call, each of which begins at a multiple of kStateBlock elements.
template <int kMoments>
struct OptimizerArenas {
  StateType type;
  void* moment[at_least_one(kMoments)];
  float* scale[at_least_one(kMoments)];  // where moments are codes
  int16_t* remainder;                    // where rounding is kRemainder
  void* accumulated;  // a sum of gradients that is added to the gradient, and becomes zero; or null
  ElementType accumulated_type;
  Rounding rounding;
  uint64_t seed;
};

// Random bits of an element are a function of the seed, the step, the parameter's number, the element's place
// in it, and what they are for: Philox's counter has a place's eighth in its lower words, then the step, then
// this.
constexpr uint32_t kWeightStream = 0, kMomentStream = 1;  // the latter and above: a moment each
constexpr int kNumberBits = 20;                           // of a parameter's number
SHOESTRING_HOST_DEVICE uint32_t stream_word(uint32_t number, uint32_t stream) { return number << 3 | stream; }

// ---- CPU

// One tensor of `count` elements. A tensor is worked on in blocks of kStateBlock elements.
template <class Rule>
struct OptimizerTensor {
  Rule rule;
  uint32_t step, number;
  ElementType type, grad_type;
  void* param;
  const void* grad;
  int64_t block;  // of the arenas, at which its state begins
  int64_t count;
};

template <class Rule>
struct OptimizerTable {
  // One step of blocks [first, last). Arenas have room for whole blocks; param and grad end at `count`.
  void (*step)(const OptimizerTensor<Rule>& tensor, const OptimizerArenas<Rule::kMoments>& arenas,
               int64_t first, int64_t last);
};

// ---- CUDA

// A parameter as the kernel finds it. Without a gradient it is left alone, and has no blocks of the launch.
struct OptimizerEntry {
  void* param;
  const void* grad;                                                    // null: none
  uint64_t count : 40, number : kNumberBits, type : 2, grad_type : 2;  // ElementTypes
  uint32_t block;  // of the arenas, at which its state begins; 2^32 blocks are 1 TiB of 8-bit state
  uint32_t end;    // in the blocks of a launch; the launcher's
};

// Pointers are on the device, but for `entries`. Returns an error's text or null.
template <class Rule>
struct OptimizerCuda {
  // One step of all entries, whose `steps` advance. `rules` is room for one a parameter.
  const char* (*step)(const OptimizerEntry* entries, int64_t count, const typename Rule::Options&,
                      const OptimizerArenas<Rule::kMoments>&, float* steps, Rule* rules, void* stream);
};

}  // namespace shoestring::kernels
