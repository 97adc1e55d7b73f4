#pragma once

// The types that an optimizer's kernels share on all devices: the options of a step, tensors, the moments in
// flat arenas, and the interface of an update rule.
//
// An update rule is a struct that holds the coefficients of one optimizer step. It has:
// - kMoments: the number of moments;
// - kSigned[kMoments]: whether a moment can be negative, which selects the map of its codes;
// - kLong[kMoments], optional: whether a moment is long. A long moment changes per step by less than one
//   quantisation level, so its codes would never change. It is stored as bf16 with stochastic rounding
//   instead. At least one moment is not long;
// - operator()(V& param, V grad, V (&moments)[kMoments], math): updates one element, or one vector of
//   elements. `math` has sqrt, divide, sign and fma(vector, number, vector). A rule calls fma explicitly,
//   because compilers disagree about which product of a sum of two products they fuse;
// - keeps(k): the factor by which one step multiplies moment k before it adds the new value;
// - for_codes(scales): converts the rule to moments that are divided by these scales, and to approximate
//   math;
// - Options: StepOptions and the rule's own options. Options::rule(step) returns the rule of that step,
//   counted from 1.

#include <math.h>

#include <cstdint>
#include <type_traits>

#include "core/capability.h"
#include "core/host_device.h"
#include "quantization/dynamic_map.h"
#include "quantization/map_4bit.h"

namespace shoestring::kernels {

enum class ElementType : uint8_t { kFloat, kBFloat16, kHalf };

// Storage format of the moments: fp32, bf16 with stochastic rounding, or codes with scales. If bf16 were
// rounded to nearest, a second moment could not decay.
enum class StateType : uint8_t { kFloat, kBFloat16, k8Bit, k4Bit };

// has(k) returns whether moment k of the update rule is long: Rule::kLong[k], or false if the rule has no
// kLong.
template <class Rule, class = void>
struct LongMoments {
  static constexpr bool has(int) { return false; }
};
template <class Rule>
struct LongMoments<Rule, std::void_t<decltype(Rule::kLong)>> {
  static constexpr bool has(int k) { return Rule::kLong[k]; }
};

// Returns the storage format of one moment in the arenas. A long moment changes per step by less than one
// quantisation level. As codes it would never change, so it is stored as bf16.
constexpr StateType state_of_moment(StateType state, bool is_long) {
  const bool has_codes = state == StateType::k8Bit || state == StateType::k4Bit;
  return is_long && has_codes ? StateType::kBFloat16 : state;
}

// Returns the number of scales that a moment has for a block of kStateBlock elements.
constexpr int64_t scales_per_block(StateType state, bool is_signed) {
  if (state == StateType::k4Bit) return is_signed ? kScales4<true> : kScales4<false>;
  return state == StateType::k8Bit ? 1 : 0;
}

// Selects the rounding of a moment's 4-bit codes (quantization/map_4bit.h). Unsigned moments need dithering,
// and so do signed moments whose decay per step is above 0.93.
SHOESTRING_HOST_DEVICE Rounding4 rounding_4bit(bool is_signed, float keeps, uint32_t step) {
  return !is_signed || keeps > 0.93f ? dithered4(step) : Rounding4{};
}

// How a bf16 weight is rounded after its update. fp32 and fp16 weights are always rounded to nearest.
enum class Rounding : uint8_t {
  kNearest,
  kStochastic,  // rounded up or down at random, so that the expected value is right
  // A bf16 weight and a 16-bit remainder together store an fp32 exactly. The weight is the fp32 rounded to
  // nearest, ties away from zero.
  kRemainder,
};

// The options of one optimizer step that all update rules have. Each pointer refers to one fp32 in the memory
// of the device that steps; null means that the option is not used.
struct StepOptions {
  double lr, weight_decay;
  bool maximize;
  const float* lr_tensor = nullptr;   // if given, this learning rate replaces lr
  const float* grad_scale = nullptr;  // if given, the gradients are divided by this number
  const float* clip_coef = nullptr;   // if given, the gradients are multiplied by this number
  const float* found_inf = nullptr;   // if given and not zero, the step is skipped

  SHOESTRING_HOST_DEVICE bool skips() const { return found_inf != nullptr && *found_inf != 0; }
  SHOESTRING_HOST_DEVICE double rate() const { return lr_tensor != nullptr ? *lr_tensor : lr; }

  // Returns the factor by which gradients are multiplied: clip_coef / grad_scale. The sign for `maximize` is
  // not included.
  SHOESTRING_HOST_DEVICE double factor() const {
    const double clip = clip_coef != nullptr ? *clip_coef : 1.0;
    return grad_scale != nullptr ? clip / *grad_scale : clip;
  }
};

constexpr int at_least_one(int n) { return n > 1 ? n : 1; }  // C++ arrays cannot have zero elements

// Pointers to the memory of the moments. An operator call has one arena per moment, which holds this moment
// of all parameters. Each parameter begins at a multiple of kStateBlock elements.
template <int kMoments>
struct OptimizerArenas {
  StateType type;
  void* moment[at_least_one(kMoments)];
  float* scale[at_least_one(kMoments)];  // scales of the codes; null if the moment is not stored as codes
  int16_t* remainder;                    // the lower 16 bits of the weights, if rounding is kRemainder
  // Sum of the gradients of earlier micro-batches, or null. The step adds this sum to the gradient and then
  // sets the sum to zero.
  void* accumulated;
  ElementType accumulated_type;
  Rounding rounding;
  uint64_t seed;
};

// The random bits of an element depend on the seed, the step, the parameter's number, the element's index,
// and a stream, which tells the bits' purpose. In the counter of the generator Philox, the lower words hold
// index / 8, the next word holds the step, and the last word holds stream_word().
constexpr uint32_t kWeightStream = 0, kMomentStream = 1;  // moment k uses stream kMomentStream + k
constexpr int kNumberBits = 20;                           // width of a parameter's number, in bits
SHOESTRING_HOST_DEVICE uint32_t stream_word(uint32_t number, uint32_t stream) { return number << 3 | stream; }

// ---- CPU

// A parameter of `count` elements and its gradient. The kernels work on blocks of kStateBlock elements.
template <class Rule>
struct OptimizerTensor {
  Rule rule;
  uint32_t step, number;
  ElementType type, grad_type;
  void* param;
  const void* grad;
  int64_t block;  // first block of the parameter's state in the arenas
  int64_t count;
};

template <class Rule>
struct OptimizerTable {
  // Steps the blocks [first, last) of a tensor. In the arenas (flat state tensors) the last block is padded
  // to full size, but param and grad have only `count` elements.
  void (*step)(const OptimizerTensor<Rule>& tensor, const OptimizerArenas<Rule::kMoments>& arenas,
               int64_t first, int64_t last);
};

// ---- CUDA

// A parameter as the CUDA kernel reads it. A parameter without a gradient is not stepped, and has no blocks
// in the launch.
struct OptimizerEntry {
  void* param;
  const void* grad;  // null if the parameter has no gradient
  uint64_t count : 40, number : kNumberBits, type : 2, grad_type : 2;  // type and grad_type: enum ElementType
  uint32_t block;  // first block of the parameter's state in the arenas; 2^32 blocks are 1 TiB of 8-bit state
  uint32_t end;    // end of the parameter's blocks among all blocks of the launch; set by the launcher
};

// Launches the CUDA kernel of an update rule. All pointers except `entries` refer to device memory. Returns
// an error message, or null.
template <class Rule>
struct OptimizerCuda {
  // Steps all parameters in `entries`, and increments their step counters `steps`. `rules` is scratch memory
  // for one rule per parameter.
  const char* (*step)(const OptimizerEntry* entries, int64_t count, const typename Rule::Options&,
                      const OptimizerArenas<Rule::kMoments>&, float* steps, Rule* rules, void* stream);
};

}  // namespace shoestring::kernels
