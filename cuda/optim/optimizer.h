#pragma once

// The CUDA kernels of the optimizers, for any update rule. Memory bandwidth limits them, but arithmetic takes
// nearly as long: AdamW moves 10 bytes per element and executes about 60 instructions.
//
// A warp updates a block of 256 elements, eight per lane, with 16-byte loads that are all in flight together.
// The warps of a thread block share only the look-up tables of 8-bit state, so a barrier is needed only after
// these are filled. The descriptions of the tensors are kernel parameters, so that a launch handles up to
// 768 tensors without a copy to the device. A small kernel runs first. It computes the constants of each
// tensor's update from its step number and the options, so that the main kernel never calls pow().

#include "core/cuda_tables.h"
#include "cuda/core/launch.h"
#include "cuda/optim/states.h"

namespace shoestring::cuda {

using kernels::StateType;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// Number of blocks of 256 elements that a warp updates. It is large enough to make the time for filling the
// look-up tables of 8-bit state negligible.
constexpr int kBlocksPerWarp = 8;
struct Present {
  // Bit mask of the tensors in a launch that have a gradient.
  uint32_t bits[(kTensors + 31) / 32];
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

template <class Rule, class T, class Math>
__device__ void update(const Rule& rule, Vector<T, kPerLane>& param, const Vector<T, kPerLane>& grad,
                       Moments<Rule>& moments, Math math) {
  const auto one = [&](float& p, float g, int i) {
    float own[std::extent_v<Moments<Rule>>];
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

template <class Weights, class State>
__device__ void step_block(const Place& place, const typename State::Rule* rules, const State& state,
                           const typename State::Shared& shared) {
  const Weights weights(state.arenas, place);
  typename State::Loaded loaded;
  state.load(place, loaded);
  // The constants of the update rule are read again for each block of elements, so that they occupy no
  // registers in between.
  auto rule = rules[place.tensor];
  Moments<typename State::Rule> moments;
  state.decode(loaded, Weights::left(place), shared, rule, moments);
  auto param = weights.param(state.arenas, place);
  update(rule, param, weights.grad(state.arenas, place), moments, typename State::Math());
  const Place same = Weights::again(place);
  weights.store(state.arenas, same, param);
  state.store(same, moments, shared, rules);
}

// Updates the blocks [place.own, last) of a tensor. One warp calls this function.
template <class State>
__device__ void step_blocks(Place place, uint32_t last, const typename State::Rule* rules, const State& state,
                            const typename State::Shared& shared) {
  using Any = AnyWeights<decltype(state.arenas)>;
  const bool plain =
      place.aligned() && place.type() == place.grad_type() && state.arenas.accumulated == nullptr;
  const uint32_t whole = min(last, place.whole_blocks());
  if (place.group.skips()) {
#pragma unroll 1
    for (; place.own < last; ++place.own) Any::forget(state.arenas, place);
  } else if (plain && place.type() == ElementType::kFloat) {
#pragma unroll 1
    for (; place.own < whole; ++place.own) step_block<PlainWeights<float>>(place, rules, state, shared);
  } else if (plain && place.type() == ElementType::kBFloat16 && state.arenas.rounding == Rounding::kNearest) {
#pragma unroll 1
    for (; place.own < whole; ++place.own)
      step_block<PlainWeights<__nv_bfloat16>>(place, rules, state, shared);
  }
#pragma unroll 1
  for (; place.own < last; ++place.own) step_block<Any>(place, rules, state, shared);
}

// Updates all tensors of a launch. The budget below is for optimizers with three moments. The limit on
// registers depends on the kind of state (State::kResident).
// Budget: 96 registers, 3264 bytes shared, no spills.
template <class State>
__global__ void __launch_bounds__(kThreads, State::kResident)
    step(const __grid_constant__ Group group, const __grid_constant__ State state,
         const typename State::Rule* rules) {
  __shared__ typename State::Shared shared;
  if (group.skips() && state.arenas.accumulated == nullptr) return;
  state.fill_shared(shared);

  // Index of this warp's next block of elements, counted over all tensors of the launch.
  uint32_t block = (blockIdx.x * kWarps + warp()) * kBlocksPerWarp;
  const uint32_t last = min(block + kBlocksPerWarp, group.entry[group.count - 1].end);
  int tensor = 0;
  while (block < last) {
    int above = group.count - 1;  // binary search for the first tensor that ends after `block`
    while (tensor < above) {
      const int middle = (tensor + above) / 2;
      if (group.entry[middle].end > block) {
        above = middle;
      } else {
        tensor = middle + 1;
      }
    }
    const OptimizerEntry& t = group.entry[tensor];
    const uint32_t before = tensor == 0 ? 0 : group.entry[tensor - 1].end, end = min(last, t.end);
    step_blocks(Place{group, static_cast<uint32_t>(tensor), block - before}, end - before, rules, state,
                shared);
    block = end;
  }
}

template <class State, class Rule = typename State::Rule>
const char* run(const OptimizerEntry* entries, int count, const typename Rule::Options& options,
                const State& state, float* steps, Rule* rules, void* stream) {
  static_assert(sizeof(Group) + sizeof(State) + sizeof(void*) <= kParameterBytes);
  Group group;
  Present present{};
  int64_t blocks = 0;
  group.count = count;
  group.steps = steps;
  group.found_inf = options.found_inf;
  for (int i = 0; i < count; ++i) {
    OptimizerEntry& entry = group.entry[i] = entries[i];
    if (entry.grad != nullptr) {
      present.bits[i / 32] |= 1u << i % 32;
      blocks += (static_cast<int64_t>(entry.count) + kStateBlock - 1) / kStateBlock;
    }
    entry.end = static_cast<uint32_t>(blocks);
  }
  constexpr int kPrepare = 64;
  const char* error = launch(prepare<Rule>, (count + kPrepare - 1) / kPrepare, kPrepare, 0, stream, present,
                             count, options, steps, rules);
  if (error != nullptr) return error;
  constexpr int64_t kPerBlock = kWarps * kBlocksPerWarp;
  return launch(step<State>, (blocks + kPerBlock - 1) / kPerBlock, kThreads, 0, stream, group, state,
                static_cast<const Rule*>(rules));
}

template <class Rule>
const char* step_all(const OptimizerEntry* entries, int64_t count, const typename Rule::Options& options,
                     const OptimizerArenas<Rule::kMoments>& arenas, float* steps, Rule* rules, void* stream) {
  for (int64_t i = 0; i < count; i += kTensors) {
    const int some = static_cast<int>(count - i < kTensors ? count - i : kTensors);
    const auto run_as = [&](const auto& state) {
      return run(entries + i, some, options, state, steps + i, rules + i, stream);
    };
    const char* error = "";
    if constexpr (Rule::kMoments == 0) {
      error = run_as(FloatState<Rule>{arenas});
    } else {
      switch (arenas.type) {
        case StateType::kFloat:
          error = run_as(FloatState<Rule>{arenas});
          break;
        case StateType::kBFloat16:
          error = run_as(BFloat16State<Rule>{arenas});
          break;
        case StateType::k8Bit:
          error = run_as(EightBitState<Rule>{arenas});
          break;
        case StateType::k4Bit:
          error = run_as(FourBitState<Rule>{arenas});
          break;
      }
    }
    if (error != nullptr) return error;
  }
  return nullptr;
}

/// Registers the kernels of an update rule when the library is loaded.
template <class Rule>
bool provide_rule() {
  static const kernels::OptimizerCuda<Rule> table{step_all<Rule>};
  provide(Rule::kName, &table);
  return true;
}

}  // namespace shoestring::cuda
