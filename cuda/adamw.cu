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
constexpr int kBlocksPerWarp = 4;  // that the tables cost little; a thousand small tensors still fill a GPU
constexpr int kTensors = 1000;     // of a launch, whose parameters have room for 32,764 bytes

struct Group {
  AdamWEntry entry[kTensors];
  int count;
};
struct Present {
  uint32_t bits[(kTensors + 31) / 32];  // of the tensors that have a gradient
};

// Budget: 64 registers, 0 bytes shared.
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
// Some 3e-7 of an update; 8-bit moments are wrong by thousands of times as much. A second moment below 1e-38 is zero
// here, so what is added to its root is at least the root of that: an update may become smaller, not explode.
struct FastMath {
  __device__ static float sqrt(float x) { return fmaxf(fast_sqrt(x), 1.1e-19f); }
  __device__ static float divide(float a, float b) { return a * fast_reciprocal(b); }
};

template <class T, class Math>
__device__ void update(const AdamWRule& rule, Vector<T, kPerLane>& param, const Vector<T, kPerLane>& grad,
                       float (&m)[kPerLane], float (&v)[kPerLane], Math math) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    float p = to_float(param[i]);
    rule(p, to_float(grad[i]), m[i], v[i], math);
    param[i] = rounded<T>(p);
  }
}

// A block's part of a tensor: `count` elements are left from here on.
template <class T>
struct Row {
  T* param;
  const T* grad;
  int64_t count;
  bool vectors;
};

template <class T>
__device__ Row<T> row_of(const AdamWEntry& t, int64_t block) {
  T* param = static_cast<T*>(t.param);
  const T* grad = static_cast<const T*>(t.grad);
  const int64_t begin = block * kStateBlock, count = static_cast<int64_t>(t.count) - begin;
  const bool aligned = ((reinterpret_cast<uintptr_t>(param) | reinterpret_cast<uintptr_t>(grad)) & 15) == 0;
  return {param + begin, grad + begin, count, aligned && count >= kStateBlock};
}

struct EightBitState {
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
  __device__ void step(const Row<T>& row, int64_t block, AdamWRule rule, const Shared& shared) const {
    const int64_t begin = block * kStateBlock + lane() * kPerLane;
    uint8_t* m_codes = static_cast<uint8_t*>(state.exp_avg) + begin;
    uint8_t* v_codes = static_cast<uint8_t*>(state.exp_avg_sq) + begin;
    float* m_scale = state.exp_avg_scale + block;
    float* v_scale = state.exp_avg_sq_scale + block;

    const auto grad = load_part(row.grad, row.count, row.vectors);
    auto param = load_part(row.param, row.count, row.vectors);
    const uint2 old_m = *reinterpret_cast<const uint2*>(m_codes);
    const uint2 old_v = *reinterpret_cast<const uint2*>(v_codes);
    rule.beta1 *= *m_scale;  // in place of scaling eight values
    rule.beta2 *= *v_scale;

    float m[kPerLane], v[kPerLane];
    decode(old_m, shared.m, m);
    decode(old_v, shared.v, v);
    if (row.count < kStateBlock) {  // what lies past the end is zero whatever its codes are
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (lane() * kPerLane + i >= row.count) m[i] = v[i] = 0;
      }
    }
    update(rule, param, grad, m, v, FastMath());
    store_part(row.param, row.count, row.vectors, param);

    const float new_m = largest_magnitude(m), new_v = largest_magnitude(v);
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
  AdamWState state;
  struct Shared {};

  __device__ void fill_shared(Shared&) const {}

  template <class T>
  __device__ void step(const Row<T>& row, int64_t block, const AdamWRule& rule, const Shared&) const {
    const int64_t begin = block * kStateBlock;
    float* m_row = static_cast<float*>(state.exp_avg) + begin;
    float* v_row = static_cast<float*>(state.exp_avg_sq) + begin;
    const auto grad = load_part(row.grad, row.count, row.vectors);
    auto param = load_part(row.param, row.count, row.vectors);
    auto m = load_part(m_row, kStateBlock, true), v = load_part(v_row, kStateBlock, true);
    update(rule, param, grad, m.value, v.value, ExactMath());
    store_part(row.param, row.count, row.vectors, param);
    store_part(m_row, kStateBlock, true, m);
    store_part(v_row, kStateBlock, true, v);
  }
};

// Budget: 64 registers, 4224 bytes shared, no spills.
template <class State>
__global__ void __launch_bounds__(kThreads, 4) step(const __grid_constant__ Group group,
                                                    const __grid_constant__ State state, const AdamWRule* rules,
                                                    const float* found_inf) {
  __shared__ typename State::Shared shared;
  if (found_inf != nullptr && *found_inf != 0) return;
  state.fill_shared(shared);

  const int64_t first = int64_t{blockIdx.x} * (kWarps * kBlocksPerWarp) + warp();
  const int64_t last = group.entry[group.count - 1].end;
  int tensor = 0;
  int64_t begin = 0, end = 0;  // of the tensor, in the launch's blocks
  for (int k = 0; k < kBlocksPerWarp; ++k) {
    const int64_t block = first + k * kWarps;
    if (block >= last) return;
    if (block >= end) {  // the first tensor that ends behind the block
      int above = group.count - 1;
      while (tensor < above) {
        const int middle = (tensor + above) / 2;
        if (group.entry[middle].end > block) {
          above = middle;
        } else {
          tensor = middle + 1;
        }
      }
      begin = tensor == 0 ? 0 : group.entry[tensor - 1].end;
      end = group.entry[tensor].end;
    }
    const AdamWEntry& t = group.entry[tensor];
    const int64_t own = block - begin, arena = t.block + own;
    const AdamWRule rule = rules[tensor];
    switch (static_cast<WeightType>(t.type)) {
      case WeightType::kFloat: state.step(row_of<float>(t, own), arena, rule, shared); break;
      case WeightType::kBFloat16: state.step(row_of<__nv_bfloat16>(t, own), arena, rule, shared); break;
      case WeightType::kHalf: state.step(row_of<__half>(t, own), arena, rule, shared); break;
    }
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
    if (entry.grad != nullptr) {
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
