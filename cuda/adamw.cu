// Bandwidth-bound, but barely: 10 bytes move for some 60 instructions an element. A warp steps a block of 256 elements,
// eight a lane, with 16-byte loads that are all in flight together; it shares nothing with other warps but the tables,
// so only those need a barrier. What describes the tensors travels in the kernel's own parameters: a thousand in one
// launch without a copy to the device. A first small kernel turns steps and options into numbers, so that this one
// raises nothing to a power.

#include "common/convert.h"
#include "common/launch.h"
#include "dynamic_map.h"
#include "kernels/adamw.h"
#include "kernels/cuda.h"

namespace shoestring::cuda {
namespace {

using kernels::AdamWEntry;
using kernels::AdamWOptions;
using kernels::AdamWRule;
using kernels::AdamWState;
using kernels::kStateBlock;
using kernels::WeightType;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksPerWarp = 8;  // so that filling the tables costs little
constexpr int kTensors = 1000;     // of a launch, whose parameters have room for 32,764 bytes

struct Group {
  AdamWEntry entry[kTensors];
  int count;
};
struct Present {
  uint32_t bits[(kTensors + 31) / 32];  // of the tensors that have a gradient
};

// Budget: 48 registers, 0 bytes shared.
__global__ void prepare(const __grid_constant__ Present present, int count, AdamWOptions options, float* steps,
                        AdamWRule* rules) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count || (present.bits[i / 32] >> i % 32 & 1) == 0 || options.skips()) return;
  const float step = steps[i] + 1;
  steps[i] = step;
  rules[i] = options.rule(step);
}

struct ExactMath {
  __device__ static float sqrt(float x) { return sqrtf(x); }
  __device__ static float divide(float a, float b) { return a / b; }
};
// Some 3e-7 of an update, where 8-bit moments are wrong by thousands of times as much.
struct FastMath {
  __device__ static float sqrt(float x) { return fast_sqrt(x); }
  __device__ static float divide(float a, float b) { return a * fast_reciprocal(b); }
};
// A second moment below 1.2e-38 has the root zero there. What is added is at least the root of that, so that an update
// may become smaller, but not explode.
constexpr float kLeastEps = 1.1e-19f;

template <class T, class Math>
__device__ void update(const AdamWRule& rule, Vector<T, kPerLane>& param, const Vector<T, kPerLane>& grad,
                       float (&m)[kPerLane], float (&v)[kPerLane], Math math) {
#pragma unroll
  for (int i = 0; i < kPerLane; i += 2) {
    float2 p = to_floats(&param[i]);
    const float2 g = to_floats(&grad[i]);
    rule(p.x, g.x, m[i], v[i], math);
    rule(p.y, g.y, m[i + 1], v[i + 1], math);
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

struct EightBitState {
  static constexpr int kResident = 4;  // blocks a multiprocessor: 32 warps, for which there are 64 registers a thread
  AdamWState state;
  MapConstants map_m, map_v;
  struct Shared {
    SharedMap m, v;
  };

  __device__ void fill_shared(Shared& shared) const {
    fill<true>(shared.m, map_m);
    fill<false>(shared.v, map_v);
    __syncthreads();
  }

  template <class T>
  __device__ void step(const Part<T>& part, uint32_t block, AdamWRule rule, const Shared& shared) const {
    const uint64_t at = uint64_t{block} * kStateBlock + lane() * kPerLane;
    uint8_t* m_codes = static_cast<uint8_t*>(state.exp_avg) + at;
    uint8_t* v_codes = static_cast<uint8_t*>(state.exp_avg_sq) + at;
    float* m_scale = state.exp_avg_scale + block;
    float* v_scale = state.exp_avg_sq_scale + block;

    const Raw<T> raw_grad = load_part(part.grad, part.left, part.vectors);
    const Raw<T> raw_param = load_part<T>(part.param, part.left, part.vectors);
    const uint2 old_m = *reinterpret_cast<const uint2*>(m_codes);
    const uint2 old_v = *reinterpret_cast<const uint2*>(v_codes);
    rule.beta1 *= *m_scale;  // in place of scaling eight values
    rule.beta2 *= *v_scale;
    rule.eps = fmaxf(rule.eps, kLeastEps);

    float m[kPerLane], v[kPerLane];
    decode(old_m, shared.m, m);
    decode(old_v, shared.v, v);
    if (part.left < kPerLane) {  // what lies past the end is zero whatever its codes are
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (i >= part.left) m[i] = v[i] = 0;
      }
    }
    auto param = raw_param.values();
    update(rule, param, raw_grad.values(), m, v, FastMath());
    store_part(part.param, part.left, part.vectors, param);

    const float new_m = largest_magnitude<true>(m), new_v = largest_magnitude<false>(v);
    __syncwarp();  // all lanes have read the old scales
    if (lane() == 0) {
      *m_scale = new_m;
      *v_scale = new_v;
    }
    *reinterpret_cast<uint2*>(m_codes) = encode<true>(m, new_m, shared.m, map_m.bend);
    *reinterpret_cast<uint2*>(v_codes) = encode<false>(v, new_v, shared.v, map_v.bend);
  }
};

struct FloatState {
  static constexpr int kResident = 3;
  AdamWState state;
  struct Shared {};

  __device__ void fill_shared(Shared&) const {}

  template <class T>
  __device__ void step(const Part<T>& part, uint32_t block, const AdamWRule& rule, const Shared&) const {
    const uint64_t at = uint64_t{block} * kStateBlock + lane() * kPerLane;
    float* exp_avg = static_cast<float*>(state.exp_avg) + at;
    float* exp_avg_sq = static_cast<float*>(state.exp_avg_sq) + at;
    const Raw<T> raw_grad = load_part(part.grad, part.left, part.vectors);
    const Raw<T> raw_param = load_part<T>(part.param, part.left, part.vectors);
    auto m = load<kPerLane>(exp_avg), v = load<kPerLane>(exp_avg_sq);
    auto param = raw_param.values();
    update(rule, param, raw_grad.values(), m.value, v.value, ExactMath());
    store_part(part.param, part.left, part.vectors, param);
    store(exp_avg, m);
    store(exp_avg_sq, v);
  }
};

// By a warp: `count` blocks of a tensor from its block `first` on.
template <class T, class State>
__device__ void step_blocks(const AdamWEntry& t, uint32_t first, uint32_t count, const AdamWRule* rule,
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

static_assert(sizeof(Group) + sizeof(EightBitState) + 2 * sizeof(void*) <= 32764);

// Budget: 72 registers, 2176 bytes shared, no spills.
template <class State>
__global__ void __launch_bounds__(kThreads, State::kResident)
    step(const __grid_constant__ Group group, const __grid_constant__ State state, const AdamWRule* rules,
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
    const AdamWEntry& t = group.entry[tensor];
    const uint32_t own = block - (tensor == 0 ? 0 : group.entry[tensor - 1].end), end = min(last, t.end);
    const AdamWRule* rule = rules + tensor;  // read for each block, to keep registers for other things
    switch (static_cast<WeightType>(t.type)) {
      case WeightType::kFloat: step_blocks<float>(t, own, end - block, rule, state, shared); break;
      case WeightType::kBFloat16: step_blocks<__nv_bfloat16>(t, own, end - block, rule, state, shared); break;
      case WeightType::kHalf: step_blocks<__half>(t, own, end - block, rule, state, shared); break;
    }
    block = end;
  }
}

template <class State>
const char* run(const AdamWEntry* entries, int count, const AdamWOptions& options, const State& state, float* steps,
                AdamWRule* rules, void* stream) {
  Group group;
  Present present{};
  int64_t blocks = 0;
  group.count = count;
  for (int i = 0; i < count; ++i) {
    AdamWEntry& entry = group.entry[i] = entries[i];
    if (entry.type != kernels::kNoGradient) {
      present.bits[i / 32] |= 1u << i % 32;
      blocks += (static_cast<int64_t>(entry.count) + kStateBlock - 1) / kStateBlock;
    }
    entry.end = static_cast<uint32_t>(blocks);
  }
  constexpr int kPrepare = 64;
  const char* error =
      launch(prepare, (count + kPrepare - 1) / kPrepare, kPrepare, 0, stream, present, count, options, steps, rules);
  if (error != nullptr) return error;
  constexpr int64_t kPerBlock = kWarps * kBlocksPerWarp;
  return launch(step<State>, (blocks + kPerBlock - 1) / kPerBlock, kThreads, 0, stream, group, state, rules,
                options.found_inf);
}

const char* step_all(const AdamWEntry* entries, int64_t count, const AdamWOptions& options, const AdamWState& state,
                     float* steps, AdamWRule* rules, void* stream) {
  const EightBitState eight_bit{state, make_constants(true), make_constants(false)};
  for (int64_t i = 0; i < count; i += kTensors) {
    const int some = static_cast<int>(count - i < kTensors ? count - i : kTensors);
    const char* error = state.exp_avg_scale != nullptr
                            ? run(entries + i, some, options, eight_bit, steps + i, rules + i, stream)
                            : run(entries + i, some, options, FloatState{state}, steps + i, rules + i, stream);
    if (error != nullptr) return error;
  }
  return nullptr;
}

const kernels::AdamWCuda kTable{step_all};
const bool kProvided = (provide("adamw", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
