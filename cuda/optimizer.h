#pragma once

// Bandwidth-bound, but barely: AdamW moves 10 bytes for some 60 instructions an element. A warp steps a block of 256
// elements, eight a lane, with 16-byte loads that are all in flight together; it shares nothing with other warps but
// the tables, so only those need a barrier. What describes the tensors travels in the kernel's own parameters: a
// thousand in one launch without a copy to the device. A first small kernel turns steps and options into rules, so
// that this one raises nothing to a power.

#include <type_traits>

#include "common/convert.h"
#include "common/launch.h"
#include "dynamic_map.h"
#include "kernels/cuda.h"
#include "kernels/optimizer.h"

namespace shoestring::cuda {

using kernels::kStateBlock;
using kernels::OptimizerEntry;
using kernels::OptimizerState;
using kernels::WeightType;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksPerWarp = 8;  // so that filling the tables costs little
constexpr int kTensors = 1000;     // of a launch, whose parameters have room for 32,764 bytes

struct Group {
  OptimizerEntry entry[kTensors];
  int count;
};
struct Present {
  uint32_t bits[(kTensors + 31) / 32];  // of the tensors that have a gradient
};

// Budget: 48 registers, 0 bytes shared.
template <class Rule>
__global__ void prepare(const __grid_constant__ Present present, int count, typename Rule::Options options,
                        float* steps, Rule* rules) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count || (present.bits[i / 32] >> i % 32 & 1) == 0 || options.skips()) return;
  const float step = steps[i] + 1;
  steps[i] = step;
  rules[i] = options.rule(step);
}

struct ExactMath {
  __device__ static float sqrt(float x) { return sqrtf(x); }
  __device__ static float divide(float a, float b) { return a / b; }
  __device__ static float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  __device__ static float sign(float x) { return fabsf(x) > 0 ? copysignf(1.f, x) : x; }  // zero and NaN: their own
};
// Some 3e-7 of an update, where 8-bit moments are wrong by thousands of times as much.
struct FastMath : ExactMath {
  // Fused as the compiler finds best: with one order fixed, AdamW needs a register more than an sm_75 has.
  __device__ static float fma(float a, float b, float c) { return a * b + c; }
  __device__ static float sqrt(float x) { return fast_sqrt(x); }
  __device__ static float divide(float a, float b) { return a * fast_reciprocal(b); }
};

// A lane's part of all moments.
template <class Rule>
using Moments = Vector<float, kPerLane>[Rule::kMoments];

template <class Rule, class T, class Math>
__device__ void update(const Rule& rule, Vector<T, kPerLane>& param, const Vector<T, kPerLane>& grad,
                       Moments<Rule>& moments, Math math) {
  const auto one = [&](float& p, float g, int i) {
    float own[Rule::kMoments];
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) own[k] = moments[k][i];
    rule(p, g, own, math);
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) moments[k][i] = own[k];
  };
#pragma unroll
  for (int i = 0; i < kPerLane; i += 2) {
    float2 p = to_floats(&param[i]);
    const float2 g = to_floats(&grad[i]);
    one(p.x, g.x, i);
    one(p.y, g.y, i + 1);
    round_pair(p.x, p.y, &param[i]);
  }
}

// A lane's part of a tensor's block, of which `left` elements lie before the tensor's end.
template <class T>
struct Part {
  T* param;
  const T* grad;
  int left;
  bool vectors;
};

// body(k) for each moment, k being a constant in its type: which 8-bit map a moment has is part of the code.
template <class Rule, int k = 0, class Body>
__device__ __forceinline__ void each_moment(Body body) {
  if constexpr (k < Rule::kMoments) {
    body(std::integral_constant<int, k>{});
    each_moment<Rule, k + 1>(body);
  }
}

template <class R>
struct EightBitState {
  using Rule = R;
  static constexpr int kResident = 4;  // blocks a multiprocessor: 32 warps, for which there are 64 registers a thread
  OptimizerState<Rule> state;
  MapConstants map[Rule::kMoments];
  struct Shared {
    SharedMap map[Rule::kMoments];
  };

  explicit EightBitState(const OptimizerState<Rule>& s) : state(s) {
    for (int k = 0; k < Rule::kMoments; ++k) map[k] = make_constants(Rule::kSigned[k]);
  }

  __device__ void fill_shared(Shared& shared) const {
    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      fill<Rule::kSigned[k]>(shared.map[k], map[k]);
    });
    __syncthreads();
  }

  template <class T>
  __device__ void step(const Part<T>& part, uint32_t block, Rule rule, const Shared& shared) const {
    const uint64_t at = uint64_t{block} * kStateBlock + lane() * kPerLane;
    const Raw<T> raw_grad = load_part(part.grad, part.left, part.vectors);
    const Raw<T> raw_param = load_part<T>(part.param, part.left, part.vectors);
    uint2 old[Rule::kMoments];
    float scales[Rule::kMoments];
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) {
      old[k] = *reinterpret_cast<const uint2*>(codes(k) + at);
      scales[k] = state.scale[k][block];
    }
    rule.for_codes(scales);  // in place of scaling eight values

    Moments<Rule> moments;
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) decode(old[k], shared.map[k], moments[k].value);
    if (part.left < kPerLane) {  // what lies past the end is zero whatever its codes are
#pragma unroll
      for (int i = 0; i < kPerLane * Rule::kMoments; ++i) {
        if (i % kPerLane >= part.left) moments[i / kPerLane][i % kPerLane] = 0;
      }
    }
    auto param = raw_param.values();
    update(rule, param, raw_grad.values(), moments, FastMath());
    store_part(part.param, part.left, part.vectors, param);

    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      scales[k] = largest_magnitude<Rule::kSigned[k]>(moments[k].value);
    });
    __syncwarp();  // all lanes have read the old scales
    if (lane() == 0) {
#pragma unroll
      for (int k = 0; k < Rule::kMoments; ++k) state.scale[k][block] = scales[k];
    }
    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      *reinterpret_cast<uint2*>(codes(k) + at) =
          encode<Rule::kSigned[k]>(moments[k].value, scales[k], shared.map[k], map[k].bend);
    });
  }

 private:
  __device__ uint8_t* codes(int k) const { return static_cast<uint8_t*>(state.moment[k]); }
};

template <class R>
struct FloatState {
  using Rule = R;
  static constexpr int kResident = 3;
  OptimizerState<Rule> state;
  struct Shared {};

  __device__ void fill_shared(Shared&) const {}

  template <class T>
  __device__ void step(const Part<T>& part, uint32_t block, const Rule& rule, const Shared&) const {
    const uint64_t at = uint64_t{block} * kStateBlock + lane() * kPerLane;
    const Raw<T> raw_grad = load_part(part.grad, part.left, part.vectors);
    const Raw<T> raw_param = load_part<T>(part.param, part.left, part.vectors);
    Moments<Rule> moments;
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) moments[k] = load<kPerLane>(values(k) + at);
    auto param = raw_param.values();
    update(rule, param, raw_grad.values(), moments, ExactMath());
    store_part(part.param, part.left, part.vectors, param);
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) store(values(k) + at, moments[k]);
  }

 private:
  __device__ float* values(int k) const { return static_cast<float*>(state.moment[k]); }
};

// By a warp: `count` blocks of a tensor from its block `first` on.
template <class T, class State>
__device__ void step_blocks(const OptimizerEntry& t, uint32_t first, uint32_t count, const typename State::Rule* rule,
                            const State& state, const typename State::Shared& shared) {
  T* param = static_cast<T*>(t.param);
  const T* grad = static_cast<const T*>(t.grad);
  const bool aligned = ((reinterpret_cast<uintptr_t>(param) | reinterpret_cast<uintptr_t>(grad)) & 15) == 0;
#pragma unroll 1
  for (uint32_t block = first; block < first + count; ++block) {
    const uint64_t begin = uint64_t{block} * kStateBlock, left = t.count - begin, at = begin + lane() * kPerLane;
    const int in_block = left < kStateBlock ? static_cast<int>(left) : kStateBlock;
    state.step(Part<T>{param + at, grad + at, in_block - lane() * kPerLane, aligned && in_block == kStateBlock},
               t.block + block, *rule, shared);
  }
}

// Budget: 72 registers, 2176 bytes shared, no spills.
template <class State>
__global__ void __launch_bounds__(kThreads, State::kResident)
    step(const __grid_constant__ Group group, const __grid_constant__ State state, const typename State::Rule* rules,
         const float* found_inf) {
  __shared__ typename State::Shared shared;
  if (found_inf != nullptr && *found_inf != 0) return;
  state.fill_shared(shared);

  uint32_t block = (blockIdx.x * kWarps + warp()) * kBlocksPerWarp;  // of the launch
  const uint32_t last = min(block + kBlocksPerWarp, group.entry[group.count - 1].end);
  int tensor = 0;
  while (block < last) {
    int above = group.count - 1;  // to the first tensor that ends behind the block
    while (tensor < above) {
      const int middle = (tensor + above) / 2;
      if (group.entry[middle].end > block) {
        above = middle;
      } else {
        tensor = middle + 1;
      }
    }
    const OptimizerEntry& t = group.entry[tensor];
    const uint32_t own = block - (tensor == 0 ? 0 : group.entry[tensor - 1].end), end = min(last, t.end);
    const auto* rule = rules + tensor;  // read for each block, to keep registers for other things
    switch (static_cast<WeightType>(t.type)) {
      case WeightType::kFloat: step_blocks<float>(t, own, end - block, rule, state, shared); break;
      case WeightType::kBFloat16: step_blocks<__nv_bfloat16>(t, own, end - block, rule, state, shared); break;
      case WeightType::kHalf: step_blocks<__half>(t, own, end - block, rule, state, shared); break;
    }
    block = end;
  }
}

template <class State, class Rule = typename State::Rule>
const char* run(const OptimizerEntry* entries, int count, const typename Rule::Options& options, const State& state,
                float* steps, Rule* rules, void* stream) {
  static_assert(sizeof(Group) + sizeof(State) + 2 * sizeof(void*) <= 32764);
  Group group;
  Present present{};
  int64_t blocks = 0;
  group.count = count;
  for (int i = 0; i < count; ++i) {
    OptimizerEntry& entry = group.entry[i] = entries[i];
    if (entry.type != kernels::kNoGradient) {
      present.bits[i / 32] |= 1u << i % 32;
      blocks += (static_cast<int64_t>(entry.count) + kStateBlock - 1) / kStateBlock;
    }
    entry.end = static_cast<uint32_t>(blocks);
  }
  constexpr int kPrepare = 64;
  const char* error = launch(prepare<Rule>, (count + kPrepare - 1) / kPrepare, kPrepare, 0, stream, present, count,
                             options, steps, rules);
  if (error != nullptr) return error;
  constexpr int64_t kPerBlock = kWarps * kBlocksPerWarp;
  return launch(step<State>, (blocks + kPerBlock - 1) / kPerBlock, kThreads, 0, stream, group, state,
                static_cast<const Rule*>(rules), options.found_inf);
}

template <class Rule>
const char* step_all(const OptimizerEntry* entries, int64_t count, const typename Rule::Options& options,
                     const OptimizerState<Rule>& state, float* steps, Rule* rules, void* stream) {
  for (int64_t i = 0; i < count; i += kTensors) {
    const int some = static_cast<int>(count - i < kTensors ? count - i : kTensors);
    const char* error =
        state.scale[0] != nullptr
            ? run(entries + i, some, options, EightBitState<Rule>(state), steps + i, rules + i, stream)
            : run(entries + i, some, options, FloatState<Rule>{state}, steps + i, rules + i, stream);
    if (error != nullptr) return error;
  }
  return nullptr;
}

/// A rule's kernels, handed over when the library is loaded.
template <class Rule>
bool provide_rule() {
  static const kernels::OptimizerCuda<Rule> table{step_all<Rule>};
  provide(Rule::kName, &table);
  return true;
}

}  // namespace shoestring::cuda
