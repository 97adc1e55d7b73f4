#pragma once

// What the optimizers share: a parameter, its moments in flat arenas (8-bit codes with scales, or fp32), and a rule.
//
// A rule is a struct of one step's numbers with
//   kMoments, kSigned[kMoments]  how many moments it keeps, and which may be negative (their 8-bit map)
//   operator()(V& param, V grad, V (&moments)[kMoments], math)  for one element, or one vector of elements;
//                                math has sqrt, divide, sign, and fma(vector, number, vector), because where a sum
//                                has two products compilers do not agree on which one is fused
//   for_codes(scales)            turns it into the same for moments in units of these, and for math that is not exact
//   Options                      StepOptions and more, with rule(step): the rule of step number `step`, from one on
// The kernels of every device share it.

#include <math.h>

#include <cstdint>

#include "kernels/capability.h"
#include "kernels/dynamic_map.h"
#include "kernels/host_device.h"

namespace shoestring::kernels {

enum class WeightType { kFloat, kBFloat16, kHalf };

// A step's numbers, of any rule. Those behind pointers are one fp32 each, in the memory of the device that steps; null:
// none.
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

// ---- CPU ----------------------------------------------------------------------------------------------------------

// One tensor of `count` elements and its state. A tensor is worked on in blocks of kStateBlock elements.
template <class Rule>
struct OptimizerTensor {
  Rule rule;
  WeightType type;
  void* param;
  const void* grad;
  void* moment[Rule::kMoments];  // uint8 codes where there are scales, else fp32
  float* scale[Rule::kMoments];  // one a block, or null
  int64_t count;
};

template <class Rule>
struct OptimizerTable {
  // One step of blocks [first, last). The state has room for whole blocks; param and grad end at `count`.
  void (*step)(const OptimizerTensor<Rule>& tensor, int64_t first, int64_t last);
};

// ---- CUDA ---------------------------------------------------------------------------------------------------------

// A parameter as the kernel finds it. Without a gradient it is left alone, and has no blocks of the launch.
constexpr uint64_t kNoGradient = 3;  // in place of a type
struct OptimizerEntry {
  void* param;
  const void* grad;
  uint64_t count : 62, type : 2;  // a WeightType
  uint32_t block;                 // of the arena, at which its state begins; 2^32 blocks are 1 TiB of 8-bit state
  uint32_t end;                   // in the blocks of a launch; the launcher's
};

template <class Rule>
struct OptimizerState {
  void* moment[Rule::kMoments];  // uint8 codes where there are scales, else fp32; multiples of 16 bytes
  float* scale[Rule::kMoments];
};

// Pointers are on the device, but for `entries`. Returns an error's text or null.
template <class Rule>
struct OptimizerCuda {
  // One step of all entries, whose `steps` advance. `rules` is room for one a parameter.
  const char* (*step)(const OptimizerEntry* entries, int64_t count, const typename Rule::Options&,
                      const OptimizerState<Rule>&, float* steps, Rule* rules, void* stream);
};

}  // namespace shoestring::kernels
