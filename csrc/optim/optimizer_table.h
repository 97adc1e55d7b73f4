#pragma once

// The types that an optimizer's kernels share on all devices: a step's options, tensors, the moments in flat
// arenas, and the contract of an update rule.
//
// A rule is a struct that holds the numbers of one step. It has:
// - kMoments: the number of moments;
// - kSigned[kMoments]: whether a moment can be negative, which selects the map of its codes;
// - kLong[kMoments], optional: moment k moves less per step than one quantisation level, so its codes would
//   never change. Stored as bf16 with stochastic rounding. At least one moment is not long;
// - operator()(V& param, V grad, V (&moments)[kMoments], math): updates one element, or one vector of
//   elements. `math` has sqrt, divide, sign and fma(vector, number, vector). A rule calls fma explicitly,
//   because compilers disagree about which product of a sum of two products they fuse;
// - keeps(k): the factor by which one step multiplies moment k before it adds the new value;
// - for_codes(scales): converts the rule to moments in units of these scales, and to math that is not exact;
// - Options: StepOptions and the rule's own options, with rule(step). It returns the rule of step `step`,
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

// Storage format of the moments: fp32, bf16 with stochastic rounding, or codes with scales. With rounding to
// nearest, a bf16 second moment could not decay.
enum class StateType : uint8_t { kFloat, kBFloat16, k8Bit, k4Bit };

// Reads Rule::kLong; false for every moment of a rule without kLong.
template <class Rule, class = void>
struct LongMoments {
  static constexpr bool has(int) { return false; }
};
template <class Rule>
struct LongMoments<Rule, std::void_t<decltype(Rule::kLong)>> {
  static constexpr bool has(int k) { return Rule::kLong[k]; }
};

// Returns the storage format of one moment in the arenas. A long moment stored as codes would never change,
// so it is stored as bf16.
constexpr StateType state_of_moment(StateType state, bool is_long) {
  const bool has_codes = state == StateType::k8Bit || state == StateType::k4Bit;
  return is_long && has_codes ? StateType::kBFloat16 : state;
}

// Returns the number of scales for a block of kStateBlock elements.
constexpr int64_t scales_per_block(StateType state, bool is_signed) {
  if (state == StateType::k4Bit) return is_signed ? kScales4<true> : kScales4<false>;
  return state == StateType::k8Bit ? 1 : 0;
}

// Selects the rounding of a moment's 4-bit codes (quantization/map_4bit.h). Unsigned moments need
// dithering, and so do signed moments that keep more than 0.93 of themselves per step.
SHOESTRING_HOST_DEVICE Rounding4 rounding_4bit(bool is_signed, float keeps, uint32_t step) {
  return !is_signed || keeps > 0.93f ? dithered4(step) : Rounding4{};
}

// How a bf16 weight is rounded after its update. fp32 and fp16 weights are always rounded to nearest.
enum class Rounding : uint8_t {
  kNearest,
  kStochastic,  // rounded up or down at random, so that the expected value is right
  // The weight and 16 more bits form an fp32. The weight is its upper half, rounded to nearest, halves away
  // from zero.
  kRemainder,
};

// The options of one step that all rules have. Each pointer refers to one fp32 in the memory of the device
// that steps; null means that the option is not used.
struct StepOptions {
  double lr, weight_decay;
  bool maximize;
  const float* lr_tensor = nullptr;   // if given, replaces lr
  const float* grad_scale = nullptr;  // if given, divides the gradients
  const float* clip_coef = nullptr;   // if given, multiplies the gradients
  const float* found_inf = nullptr;   // if given and not zero, the step is skipped

  SHOESTRING_HOST_DEVICE bool skips() const { return found_inf != nullptr && *found_inf != 0; }
  SHOESTRING_HOST_DEVICE double rate() const { return lr_tensor != nullptr ? *lr_tensor : lr; }

  // Returns the factor of the gradients, without the sign that `maximize` gives them.
  SHOESTRING_HOST_DEVICE double factor() const {
    const double clip = clip_coef != nullptr ? *clip_coef : 1.0;
    return grad_scale != nullptr ? clip / *grad_scale : clip;
  }
};

constexpr int at_least_one(int n) { return n > 1 ? n : 1; }  // arrays cannot have zero elements

// The memory of the moments. One call has one arena per moment for all parameters; each parameter begins at a
// multiple of kStateBlock elements.
template <int kMoments>
struct OptimizerArenas {
  StateType type;
  void* moment[at_least_one(kMoments)];
  float* scale[at_least_one(kMoments)];  // scales of the codes; null if the moment is not stored as codes
  int16_t* remainder;                    // the lower 16 bits of the weights, if rounding is kRemainder
  // Sum of earlier gradients, or null. The step adds it to the gradient and then clears it.
  void* accumulated;
  ElementType accumulated_type;
  Rounding rounding;
  uint64_t seed;
};

// The random bits of an element depend on the seed, the step, the parameter's number, the element's index,
// and their purpose (a stream). The lower words of Philox's counter hold index / 8. The next word holds the
// step, and the last one holds stream_word().
constexpr uint32_t kWeightStream = 0, kMomentStream = 1;  // moment k has stream kMomentStream + k
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
  // Steps the blocks [first, last) of a tensor. Arenas have room for whole blocks; param and grad end at
  // `count`.
  void (*step)(const OptimizerTensor<Rule>& tensor, const OptimizerArenas<Rule::kMoments>& arenas,
               int64_t first, int64_t last);
};

// ---- CUDA

// A parameter as the CUDA kernel reads it. A parameter without a gradient is not stepped, and has no blocks
// in the launch.
struct OptimizerEntry {
  void* param;
  const void* grad;  // null if the parameter has no gradient
  uint64_t count : 40, number : kNumberBits, type : 2, grad_type : 2;  // type and grad_type are ElementTypes
  uint32_t block;  // first block of the parameter's state in the arenas; 2^32 blocks are 1 TiB of 8-bit state
  uint32_t end;    // end of the parameter's blocks in the launch; set by the launcher
};

// The CUDA launcher of a rule. All pointers except `entries` refer to device memory. Returns an error
// message, or null.
template <class Rule>
struct OptimizerCuda {
  // Takes one step of all entries, and increments `steps`. `rules` is workspace for one rule per parameter.
  const char* (*step)(const OptimizerEntry* entries, int64_t count, const typename Rule::Options&,
                      const OptimizerArenas<Rule::kMoments>&, float* steps, Rule* rules, void* stream);
};

}  // namespace shoestring::kernels
