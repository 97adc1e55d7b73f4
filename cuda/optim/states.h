#pragma once

// The storage formats of the optimizers' moments on the GPU. Each struct loads, decodes and stores a lane's
// eight elements of each moment.
//
// kResident is the number of thread blocks that an SM should hold: 4 leave 64 registers per thread, 3 leave
// 80, 2 leave 128. With a larger kResident the kernel would spill registers; with a smaller one, fewer loads
// would be in flight.

#include <type_traits>

#include "cuda/core/math.h"
#include "cuda/optim/weights.h"
#include "cuda/quantization/map_4bit.h"

namespace shoestring::cuda {

struct ExactMath {
  __device__ static float sqrt(float x) { return sqrtf(x); }
  __device__ static float divide(float a, float b) { return a / b; }
  __device__ static float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  // Returns -1 or 1; zero and NaN are returned unchanged.
  __device__ static float sign(float x) { return fabsf(x) > 0 ? copysignf(1.f, x) : x; }
};
// Approximate math functions for update rules. The relative error that they cause in an update is about 3e-7.
// Storing moments in 16 bits or fewer causes errors that are thousands of times larger.
struct FastMath : ExactMath {
  __device__ static float sqrt(float x) { return fast_sqrt(x); }
  __device__ static float divide(float a, float b) { return a * fast_reciprocal(b); }
};

// The eight elements of each moment that a lane holds.
template <class Rule>
using Moments = Vector<float, kPerLane>[kernels::at_least_one(Rule::kMoments)];

// Calls body(k) for each moment. k is a std::integral_constant, so the 8-bit or 4-bit map of a moment is
// chosen at compile time.
template <class Rule, int k = 0, class Body>
__device__ __forceinline__ void each_moment(Body body) {
  if constexpr (k < Rule::kMoments) {
    body(std::integral_constant<int, k>{});
    each_moment<Rule, k + 1>(body);
  }
}

// Returns the address of a lane's first element of moment k.
template <class T, int kMoments>
__device__ T* moment_at(const OptimizerArenas<kMoments>& arenas, int k, const Place& place) {
  return static_cast<T*>(arenas.moment[k]) + place.in_arena();
}

template <class R>
struct FloatState {
  using Rule = R;
  using Math = ExactMath;
  static constexpr int kResident = Rule::kMoments > 2 ? 2 : 3;
  struct Shared {};
  struct Loaded {
    Moments<Rule> values;
  };
  OptimizerArenas<Rule::kMoments> arenas;

  __device__ void fill_shared(Shared&) const {}

  __device__ void load(const Place& place, Loaded& loaded) const {
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) {
      loaded.values[k] = cuda::load<kPerLane>(moment_at<const float>(arenas, k, place));
    }
  }

  __device__ void decode(const Loaded& loaded, int, const Shared&, Rule&, Moments<Rule>& moments) const {
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) moments[k] = loaded.values[k];
  }

  __device__ void store(const Place& place, Moments<Rule>& moments, const Shared&, const Rule*) const {
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) cuda::store(moment_at<float>(arenas, k, place), moments[k]);
  }
};

// A lane's elements of a moment that is stored as bf16 with stochastic rounding. These are all moments of
// bf16 state, and the long moments (optim/optimizer_table.h) of 8- and 4-bit state.
using RawMoment = Raw<__nv_bfloat16>;

template <class Rule, int k>
constexpr bool kIsLong = kernels::LongMoments<Rule>::has(k);

template <int kMoments>
__device__ RawMoment load_rounded(const OptimizerArenas<kMoments>& arenas, int k, const Place& place) {
  return load_part(moment_at<const __nv_bfloat16>(arenas, k, place), kPerLane, true);
}

__device__ inline void decode_rounded(const RawMoment& raw, Vector<float, kPerLane>& moment) {
  const auto values = raw.values();
#pragma unroll
  for (int i = 0; i < kPerLane; i += 2) {
    const float2 pair = to_floats(&values[i]);
    moment[i] = pair.x;
    moment[i + 1] = pair.y;
  }
}

template <int kMoments>
__device__ void store_rounded(const OptimizerArenas<kMoments>& arenas, int k, const Place& place,
                              const Vector<float, kPerLane>& moment) {
  const auto random = random_bits(arenas.seed, place, kernels::kMomentStream + k);
  Vector<unsigned, 4> words;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = round_stochastically(moment[2 * i], moment[2 * i + 1], random.value[i]);
  store(reinterpret_cast<unsigned*>(moment_at<__nv_bfloat16>(arenas, k, place)), words);
}

template <class R>
struct BFloat16State {
  using Rule = R;
  using Math = FastMath;
  static constexpr int kResident = Rule::kMoments > 2 ? 3 : 4;
  struct Shared {};
  struct Loaded {
    RawMoment values[Rule::kMoments];
  };
  OptimizerArenas<Rule::kMoments> arenas;

  __device__ void fill_shared(Shared&) const {}

  __device__ void load(const Place& place, Loaded& loaded) const {
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) loaded.values[k] = load_rounded(arenas, k, place);
  }

  __device__ void decode(const Loaded& loaded, int, const Shared&, Rule& rule, Moments<Rule>& moments) const {
    float ones[Rule::kMoments];
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) {
      ones[k] = 1;
      decode_rounded(loaded.values[k], moments[k]);
    }
    rule.for_codes(ones);
  }

  __device__ void store(const Place& place, Moments<Rule>& moments, const Shared&, const Rule*) const {
#pragma unroll
    for (int k = 0; k < Rule::kMoments; ++k) store_rounded(arenas, k, place, moments[k]);
  }
};

// Replaces the codes from element `left` on by the code of zero, because these elements lie past the tensor's
// end.
template <bool kSigned>
__device__ uint2 first_codes(uint2 codes, int left) {
  if (left >= kPerLane) return codes;
  const uint64_t past = left > 0 ? ~uint64_t{0} << 8 * left : ~uint64_t{0};
  const auto cut = [&](unsigned c, unsigned mask) {
    return (c & ~mask) | (kSigned ? 0x7f7f7f7fu & mask : 0);
  };
  return make_uint2(cut(codes.x, static_cast<unsigned>(past)),
                    cut(codes.y, static_cast<unsigned>(past >> 32)));
}

template <class R>
struct EightBitState {
  using Rule = R;
  using Math = FastMath;
  static constexpr int kResident = Rule::kMoments > 2 ? 3 : 4;
  struct Shared {
    SharedMap map[Rule::kMoments];
  };
  struct Loaded {
    uint2 codes[Rule::kMoments];
    RawMoment rounded[Rule::kMoments];  // holds moment k in place of codes[k] if it is a long moment
    float scale[Rule::kMoments];
  };
  OptimizerArenas<Rule::kMoments> arenas;
  MapConstants map[Rule::kMoments];

  explicit EightBitState(const OptimizerArenas<Rule::kMoments>& a) : arenas(a) {
    for (int k = 0; k < Rule::kMoments; ++k) map[k] = make_constants(Rule::kSigned[k]);
  }

  __device__ void fill_shared(Shared& shared) const {
    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (!kIsLong<Rule, k>) fill<Rule::kSigned[k]>(shared.map[k], map[k]);
    });
    __syncthreads();
  }

  __device__ void load(const Place& place, Loaded& loaded) const {
    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (kIsLong<Rule, k>) {
        loaded.rounded[k] = load_rounded(arenas, k, place);
        loaded.scale[k] = 1;
      } else {
        loaded.codes[k] = *reinterpret_cast<const uint2*>(moment_at<const uint8_t>(arenas, k, place));
        loaded.scale[k] = arenas.scale[k][place.arena_block()];
      }
    });
  }

  __device__ void decode(const Loaded& loaded, int left, const Shared& shared, Rule& rule,
                         Moments<Rule>& moments) const {
    // Decoded moments are not multiplied by their scales. Instead, for_codes() multiplies the constants of
    // the update rule, which is cheaper than scaling the eight elements of each moment.
    rule.for_codes(loaded.scale);
    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (kIsLong<Rule, k>) {
        decode_rounded(loaded.rounded[k], moments[k]);
      } else {
        cuda::decode(first_codes<Rule::kSigned[k]>(loaded.codes[k], left), shared.map[k], moments[k].value);
      }
    });
  }

  __device__ void store(const Place& place, Moments<Rule>& moments, const Shared& shared, const Rule*) const {
    float scales[Rule::kMoments];
    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (!kIsLong<Rule, k>) scales[k] = largest_magnitude<Rule::kSigned[k]>(moments[k].value);
    });
    __syncwarp();  // waits until all lanes have read the old scales, which are overwritten below
    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (kIsLong<Rule, k>) {
        store_rounded(arenas, k, place, moments[k]);
      } else {
        if (lane() == 0) arenas.scale[k][place.arena_block()] = scales[k];
        *reinterpret_cast<uint2*>(moment_at<uint8_t>(arenas, k, place)) =
            encode<Rule::kSigned[k]>(moments[k].value, scales[k], shared.map[k], map[k].bend);
      }
    });
  }
};

template <class R>
struct FourBitState {
  using Rule = R;
  using Math = FastMath;
  static constexpr int kResident = Rule::kMoments > 2 ? 3 : 4;
  struct Shared {};
  struct Loaded {
    uint32_t codes[Rule::kMoments];
    RawMoment rounded[Rule::kMoments];  // holds moment k in place of codes[k] if it is a long moment
    float scale[Rule::kMoments];        // scale of the group of elements to which the lane belongs
  };
  OptimizerArenas<Rule::kMoments> arenas;

  __device__ void fill_shared(Shared&) const {}

  __device__ void load(const Place& place, Loaded& loaded) const {
    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (kIsLong<Rule, k>) {
        loaded.rounded[k] = load_rounded(arenas, k, place);
        loaded.scale[k] = 1;
      } else {
        loaded.codes[k] = *codes_at(k, place);
        loaded.scale[k] = *scale_at<k>(place);
      }
    });
  }

  __device__ void decode(const Loaded& loaded, int left, const Shared&, Rule& rule,
                         Moments<Rule>& moments) const {
    rule.for_codes(loaded.scale);
    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (kIsLong<Rule, k>) {
        decode_rounded(loaded.rounded[k], moments[k]);
      } else {
        // Elements past the tensor's end are set to zero after decoding, because no unsigned 4-bit code
        // stands for zero.
        decode4<Rule::kSigned[k]>(loaded.codes[k], 1, moments[k].value);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) moments[k][i] = i < left ? moments[k][i] : 0;
      }
    });
  }

  __device__ void store(const Place& place, Moments<Rule>& moments, const Shared&, const Rule* rules) const {
    float scales[Rule::kMoments];
    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (!kIsLong<Rule, k>) scales[k] = find_scale4<Rule::kSigned[k]>(moments[k].value);
    });
    __syncwarp();  // waits until all lanes have read the old scales, which are overwritten below
    each_moment<Rule>([&](auto index) {
      constexpr int k = decltype(index)::value;
      constexpr bool kSigned = Rule::kSigned[k];
      if constexpr (kIsLong<Rule, k>) {
        store_rounded(arenas, k, place, moments[k]);
      } else {
        if (lane() % kGroupLanes4<kSigned> == 0) *scale_at<k>(place) = scales[k];
        const auto rounding = kernels::rounding_4bit(kSigned, rules[place.tensor].keeps(k), place.step());
        *codes_at(k, place) = encode4<kSigned>(moments[k].value, scales[k], rounding);
      }
    });
  }

 private:
  __device__ uint32_t* codes_at(int k, const Place& place) const {
    return static_cast<uint32_t*>(arenas.moment[k]) + uint64_t{place.arena_block()} * kWarp + lane();
  }
  template <int k>
  __device__ float* scale_at(const Place& place) const {
    constexpr bool kSigned = Rule::kSigned[k];
    const uint64_t first = uint64_t{place.arena_block()} * kernels::kScales4<kSigned>;
    return arenas.scale[k] + first + lane() / kGroupLanes4<kSigned>;
  }
};

}  // namespace shoestring::cuda
