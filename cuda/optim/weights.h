#pragma once

// Loading and storing a lane's eight weights and gradients. PlainWeights is for whole, aligned blocks of 256
// elements, with weights and gradients of one dtype. It loads and stores them directly. AnyWeights is for all
// other cases: different dtypes, an accumulated gradient, stochastic rounding or a stored remainder, a
// tensor's last block, and unaligned addresses. It computes in fp32 and tests the dtypes at run time.

#include "cuda/core/convert.h"
#include "cuda/optim/place.h"

namespace shoestring::cuda {

using kernels::Rounding;

template <class T>
class PlainWeights {
 public:
  static __device__ int left(const Place&) { return kPerLane; }
  static __device__ const Place& again(const Place& place) { return place; }

  template <class Arenas>
  __device__ PlainWeights(const Arenas&, const Place& place)
      : grad_(load_part(static_cast<const T*>(place.t().grad) + place.in_tensor(), kPerLane, true)),
        param_(load_part(static_cast<const T*>(place.t().param) + place.in_tensor(), kPerLane, true)) {}

  template <class Arenas>
  __device__ Vector<T, kPerLane> param(const Arenas&, const Place&) const {
    return param_.values();
  }
  template <class Arenas>
  __device__ Vector<T, kPerLane> grad(const Arenas&, const Place&) const {
    return grad_.values();
  }

  template <class Arenas>
  __device__ void store(const Arenas&, const Place& place, const Vector<T, kPerLane>& x) const {
    cuda::store(static_cast<T*>(place.t().param) + place.in_tensor(), x);
  }

 private:
  Raw<T> grad_, param_;
};

// Eight consecutive elements of a tensor, the first with index `at`. `left` of them are before the tensor's
// end. `vectors` says that vector loads are allowed.
struct Part {
  uint64_t at;
  int left;
  bool vectors;
};

// Eight elements as raw 32-bit words; elements of 16 bits occupy the first four words. As values of a 16-bit
// type, each element would occupy a whole register.
using Words = Vector<unsigned, kPerLane>;

__device__ inline Words load_words(const void* base, ElementType type, const Part& part) {
  Words words{};
  if (type == ElementType::kFloat) {
    const unsigned* from = static_cast<const unsigned*>(base) + part.at;
    if (part.vectors) return load<kPerLane>(from);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) words[i] = i < part.left ? from[i] : 0;
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(base) + part.at;
    if (part.vectors) {
      const auto half = load<4>(reinterpret_cast<const unsigned*>(from));
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = half[i];
    } else {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) words[i / 2] |= i < part.left ? unsigned{from[i]} << i % 2 * 16 : 0;
    }
  }
  return words;
}

__device__ inline void store_words(void* base, ElementType type, const Part& part, const Words& words) {
  if (type == ElementType::kFloat) {
    unsigned* to = static_cast<unsigned*>(base) + part.at;
    if (part.vectors) return store(to, words);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i < part.left) to[i] = words[i];
    }
  } else {
    uint16_t* to = static_cast<uint16_t*>(base) + part.at;
    const Vector<unsigned, 4> half{{words[0], words[1], words[2], words[3]}};
    if (part.vectors) return store(reinterpret_cast<unsigned*>(to), half);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i < part.left) to[i] = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
    }
  }
}

__device__ inline Vector<float, kPerLane> as_floats(const Words& words, ElementType type) {
  Vector<float, kPerLane> x;
  if (type == ElementType::kFloat) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = __uint_as_float(words[i]);
  } else if (type == ElementType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      x[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      x[i] = to_float(__ushort_as_half(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16)));
    }
  }
  return x;
}

// Rounds eight fp32 values to a 16-bit type. `pair` rounds two values at a time.
template <class Pair>
__device__ void narrow(const Vector<float, kPerLane>& x, Words& words, Pair pair) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto both = pair(x[2 * i], x[2 * i + 1]);
    memcpy(&words[i], &both, sizeof both);
  }
}

template <class Arenas>
class AnyWeights {
 public:
  static __device__ int left(const Place& place) { return place.left(); }
  static __device__ Place again(const Place& place) { return place.again(); }

  __device__ AnyWeights(const Arenas& arenas, const Place& place)
      : grad_(load_words(place.t().grad, place.grad_type(), in_tensor(place))) {
    if (arenas.accumulated != nullptr) add_accumulated(arenas, place);
    param_ = load_words(place.t().param, place.type(), in_tensor(place));
    if (rounding(arenas, place) == Rounding::kRemainder) {
      const auto low = load<4>(remainder(arenas, place));
#pragma unroll
      for (int i = 0; i < 4; ++i) param_[4 + i] = low[i];
    }
  }

  __device__ Vector<float, kPerLane> param(const Arenas& arenas, const Place& place) const {
    auto x = as_floats(param_, place.type());
    if (rounding(arenas, place) == Rounding::kRemainder) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int both = param_[4 + i / 2], low = i % 2 == 0 ? static_cast<int16_t>(both) : both >> 16;
        x[i] = __uint_as_float(__float_as_uint(x[i]) + low);
      }
    }
    return x;
  }

  __device__ Vector<float, kPerLane> grad(const Arenas& arenas, const Place& place) const {
    return as_floats(grad_, arenas.accumulated != nullptr ? ElementType::kFloat : place.grad_type());
  }

  __device__ void store(const Arenas& arenas, const Place& place, const Vector<float, kPerLane>& x) const {
    Words words;
    if (place.type() == ElementType::kFloat) {
      memcpy(&words, &x, sizeof words);
    } else if (place.type() == ElementType::kHalf) {
      narrow(x, words, [](float a, float b) { return __floats2half2_rn(a, b); });
    } else if (rounding(arenas, place) == Rounding::kNearest) {
      narrow(x, words, [](float a, float b) { return __floats2bfloat162_rn(a, b); });
    } else if (rounding(arenas, place) == Rounding::kStochastic) {
      const auto random = random_bits(arenas.seed, place, kernels::kWeightStream);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = round_stochastically(x[2 * i], x[2 * i + 1], random.value[i]);
    } else {
      Vector<unsigned, 4> low;
      const auto bits = [&](int i) { return x[i] == x[i] ? __float_as_uint(x[i]) : 0x7fc00000u; };
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned a = bits(2 * i), b = bits(2 * i + 1);
        words[i] = __byte_perm(a + 0x8000, b + 0x8000, 0x7632);
        low[i] = __byte_perm(a, b, 0x5410);
      }
      cuda::store(remainder(arenas, place), low);
    }
    store_words(place.t().param, place.type(), in_tensor(place), words);
  }

  // Sets the accumulated gradient to zero. For a step that is skipped, this is all that the kernel does.
  static __device__ void forget(const Arenas& arenas, const Place& place) {
    store_words(arenas.accumulated, arenas.accumulated_type, in_arena(place), Words{});
  }

 private:
  Words grad_, param_;

  static __device__ Rounding rounding(const Arenas& arenas, const Place& place) {
    return place.type() == ElementType::kBFloat16 ? arenas.rounding : Rounding::kNearest;
  }
  static __device__ Part in_tensor(const Place& place) {
    return {place.in_tensor(), place.left(), place.aligned() && place.own < place.whole_blocks()};
  }
  static __device__ Part in_arena(const Place& place) { return {place.in_arena(), kPerLane, true}; }
  static __device__ unsigned* remainder(const Arenas& arenas, const Place& place) {
    return reinterpret_cast<unsigned*>(arenas.remainder + place.in_arena());
  }

  // Adds the accumulated gradient to the loaded gradient at once, because registers cannot hold both, and
  // sets the accumulated gradient to zero.
  __device__ void add_accumulated(const Arenas& arenas, const Place& place) {
    const auto type = arenas.accumulated_type;
    const auto sum = as_floats(load_words(arenas.accumulated, type, in_arena(place)), type);
    const auto x = as_floats(grad_, place.grad_type());
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) grad_[i] = i < place.left() ? __float_as_uint(x[i] + sum[i]) : 0;
    forget(arenas, place);
  }
};

}  // namespace shoestring::cuda
