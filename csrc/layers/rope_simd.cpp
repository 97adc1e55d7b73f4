// Rotary position embedding on the CPU. The cosines and sines of a token stay in registers while all its
// heads are rotated. Each head is read once, directly from q or k with any strides. With a norm, the
// normalised head is first written to a buffer in the L1 cache, from which the rotation reads it.

#include "layers/rope_table.h"

#include <math.h>

#include "core/row_simd.h"
#include "core/some_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::Rope;
using kernels::RopeHeads;

constexpr int kWide = 2;  // number of vector registers in one step through a head
constexpr int64_t kStep = kWide * kLanes;

SHOESTRING_INLINE F32 neighbours(F32 x) {
  I32 other;
  for (int i = 0; i < kLanes; ++i) other[i] = i ^ 1;
  return __builtin_shuffle(x, other);
}

// Rotates one head and copies its elements after rotary_dim. sign: 1, or -1 for the inverse rotation.
template <class From, class To>
SHOESTRING_INLINE void rotate(const Rope& rope, const typename From::Type* x, const float* cos,
                              const float* sin, float sign, typename To::Type* y) {
  const int64_t half = rope.rotary_dim / 2;
  if (rope.interleaved) {
    sweep<kStep>(0, rope.rotary_dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      auto v = get_some<From, kWide>(x + i, n);
      const auto c = get_some<Float, kWide>(cos + i, n), s = get_some<Float, kWide>(sin + i, n);
#pragma GCC unroll 2
      for (int k = 0; k < kWide; ++k) {
        v.value[k] = v.value[k] * c.value[k] + neighbours(v.value[k]) * (s.value[k] * sign);
      }
      put_some<To>(y + i, v, n);
    });
  } else {
    sweep<kStep>(0, half, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      auto a = get_some<From, kWide>(x + i, n), b = get_some<From, kWide>(x + half + i, n);
      const auto c = get_some<Float, kWide>(cos + i, n), s = get_some<Float, kWide>(sin + i, n);
#pragma GCC unroll 2
      for (int k = 0; k < kWide; ++k) {
        const F32 first = a.value[k], second = b.value[k], turn = s.value[k] * sign;
        a.value[k] = first * c.value[k] - second * turn;
        b.value[k] = second * c.value[k] + first * turn;
      }
      put_some<To>(y + i, a, n);
      put_some<To>(y + half + i, b, n);
    });
  }
  sweep<kStep>(rope.rotary_dim, rope.head_dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    put_some<To>(y + i, get_some<From, kWide>(x + i, n), n);
  });
}

// Rotates all heads of one token, without a norm, for pairs of elements that are rotary_dim / 2 apart. The
// cosines and sines of a step are loaded once for all heads.
template <class E>
SHOESTRING_INLINE void rotate_heads(const Rope& rope, int64_t heads, const typename E::Type* x,
                                    int64_t x_stride, const float* cos, const float* sin, float sign,
                                    typename E::Type* y, int64_t y_stride) {
  const int64_t half = rope.rotary_dim / 2;
  sweep<kStep>(0, half, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    auto c = as_any<E>(get_some<Float, kWide>(cos + i, n), n),
         s = as_any<E>(get_some<Float, kWide>(sin + i, n), n);
    for (int k = 0; k < kWide; ++k)
      c.value[k] = plain_nan(c.value[k]), s.value[k] = plain_nan(s.value[k] * sign);
    for (int64_t head = 0; head < heads; ++head) {
      const auto* from = x + head * x_stride + i;
      auto* to = y + head * y_stride + i;
      auto a = get_any<E, kWide>(from, n), b = get_any<E, kWide>(from + half, n);
#pragma GCC unroll 2
      for (int k = 0; k < kWide; ++k) {
        const F32 first = a.value[k], second = b.value[k];
        a.value[k] = first * c.value[k] - second * s.value[k];
        b.value[k] = second * c.value[k] + first * s.value[k];
      }
      put_any<E>(to, a, n);
      put_any<E>(to + half, b, n);
    }
  });
  if (rope.rotary_dim == rope.head_dim) return;
  for (int64_t head = 0; head < heads; ++head) {
    __builtin_memcpy(y + head * y_stride + rope.rotary_dim, x + head * x_stride + rope.rotary_dim,
                     (rope.head_dim - rope.rotary_dim) * sizeof(typename E::Type));
  }
}

// Returns a sum over the elements of a head. body(offset, count, sums) adds each register of a step to its
// own partial sum.
template <class Body>
SHOESTRING_INLINE float head_sum(int64_t head_dim, Body body) {
  Some<kWide> sums = {};
  sweep<kStep>(0, head_dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) { body(i, n, sums); });
  return horizontal_sum(sums.value[0] + sums.value[1]);
}

template <class E>
SHOESTRING_INLINE float reciprocal_root(const Rope& rope, const typename E::Type* x) {
  const float squares =
      head_sum(rope.head_dim, [&](int64_t i, int64_t n, Some<kWide>& sums) __attribute__((always_inline)) {
        const auto v = get_some<E, kWide>(x + i, n);
        for (int k = 0; k < kWide; ++k) sums.value[k] = fma(v.value[k], v.value[k], sums.value[k]);
      });
  return 1 / ::sqrtf(squares / static_cast<float>(rope.head_dim) + rope.eps);
}

template <class E>
SHOESTRING_INLINE void forward_head(const Rope& rope, const float* weight, const typename E::Type* x,
                                    const float* cos, const float* sin, typename E::Type* y) {
  if (weight == nullptr) return rotate<E, E>(rope, x, cos, sin, 1, y);
  const float rstd = reciprocal_root<E>(rope, x);
  float normed[kernels::kMostNormedHeadDim];
  sweep<kStep>(0, rope.head_dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    auto v = get_some<E, kWide>(x + i, n);
    const auto w = get_some<Float, kWide>(weight + i, n);
    for (int k = 0; k < kWide; ++k) v.value[k] = v.value[k] * rstd * (w.value[k] + rope.offset);
    put_some<Float>(normed + i, v, n);
  });
  rotate<Float, E>(rope, normed, cos, sin, 1, y);
}

// Backward for one head. With h the normalised head, d the gradient rotated back and g = d * weight, the
// gradient of x is rstd (g - h mean(g h)). The gradient of the weight is the sum of d h over all heads.
template <class E>
SHOESTRING_INLINE void backward_head(const Rope& rope, const float* weight, const typename E::Type* x,
                                     const typename E::Type* grad, const float* cos, const float* sin,
                                     typename E::Type* grad_x, float* grad_weight) {
  if (weight == nullptr) return rotate<E, E>(rope, grad, cos, sin, -1, grad_x);
  const float rstd = reciprocal_root<E>(rope, x);
  float back[kernels::kMostNormedHeadDim];
  rotate<E, Float>(rope, grad, cos, sin, -1, back);
  const float along =
      head_sum(rope.head_dim, [&](int64_t i, int64_t n, Some<kWide>& sums) __attribute__((always_inline)) {
        const auto v = get_some<E, kWide>(x + i, n), d = get_some<Float, kWide>(back + i, n);
        const auto w = get_some<Float, kWide>(weight + i, n);
        for (int k = 0; k < kWide; ++k)
          sums.value[k] = fma(d.value[k] * (w.value[k] + rope.offset), v.value[k], sums.value[k]);
      });
  const float slope = along * rstd / static_cast<float>(rope.head_dim);
  sweep<kStep>(0, rope.head_dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    auto v = get_some<E, kWide>(x + i, n), to_weight = Some<kWide>{};
    const auto d = get_some<Float, kWide>(back + i, n), w = get_some<Float, kWide>(weight + i, n);
    if (grad_weight != nullptr) to_weight = get_some<Float, kWide>(grad_weight + i, n);
    for (int k = 0; k < kWide; ++k) {
      const F32 h = v.value[k] * rstd;
      v.value[k] = rstd * (d.value[k] * (w.value[k] + rope.offset) - h * slope);
      to_weight.value[k] = fma(d.value[k], h, to_weight.value[k]);
    }
    put_some<E>(grad_x + i, v, n);
    if (grad_weight != nullptr) put_some<Float>(grad_weight + i, to_weight, n);
  });
}

template <class T>
SHOESTRING_INLINE T* head_at(const void* base, const kernels::HeadStrides& strides, int64_t batch,
                             int64_t token, int64_t head) {
  return static_cast<T*>(const_cast<void*>(base)) + batch * strides.batch + token * strides.token +
         head * strides.head;
}

// Calls body(side, batch, token, cos, sin) twice for each token, with side 0 for its queries and side 1 for
// its keys.
template <class Body>
SHOESTRING_INLINE void for_tokens(const Rope& rope, int64_t begin, int64_t end, Body body) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t batch = i / rope.tokens, token = i % rope.tokens;
    const int64_t row =
        rope.positions == nullptr
            ? batch * rope.table_batch + token * rope.table_token
            : rope.positions[batch * rope.position_batch + token * rope.position_token] * rope.table_token;
    for (int side = 0; side < 2; ++side) {
      body(side, batch, token, static_cast<const float*>(rope.cos) + row,
           static_cast<const float*>(rope.sin) + row);
    }
  }
}

template <class E>
void forward(const Rope& rope, int64_t begin, int64_t end) {
  using T = typename E::Type;
  for_tokens(
      rope, begin, end, [&](int side, int64_t batch, int64_t token, const float* cos, const float* sin) {
        const RopeHeads& of = rope.sides[side];
        if (of.weight == nullptr && !rope.interleaved) {
          return rotate_heads<E>(rope, of.heads, head_at<const T>(of.x, of.x_strides, batch, token, 0),
                                 of.x_strides.head, cos, sin, 1,
                                 head_at<T>(of.out, of.out_strides, batch, token, 0), of.out_strides.head);
        }
        for (int64_t head = 0; head < of.heads; ++head) {
          forward_head<E>(rope, static_cast<const float*>(of.weight),
                          head_at<const T>(of.x, of.x_strides, batch, token, head), cos, sin,
                          head_at<T>(of.out, of.out_strides, batch, token, head));
        }
      });
}

// Computes the gradients of rope. The weight's gradient is summed over the heads of one token before it is
// added to the total. The rounding error is then smaller than in one long sum.
template <class E>
void backward(const Rope& rope, int64_t begin, int64_t end, float* grad_weights) {
  using T = typename E::Type;
  for_tokens(
      rope, begin, end, [&](int side, int64_t batch, int64_t token, const float* cos, const float* sin) {
        const RopeHeads& of = rope.sides[side];
        const bool normed = of.weight != nullptr, sums = normed && grad_weights != nullptr;
        if (!normed && !rope.interleaved) {
          return rotate_heads<E>(rope, of.heads, head_at<const T>(of.grad, of.grad_strides, batch, token, 0),
                                 of.grad_strides.head, cos, sin, -1,
                                 head_at<T>(of.out, of.out_strides, batch, token, 0), of.out_strides.head);
        }
        float few[kernels::kMostNormedHeadDim];
        if (sums) __builtin_memset(few, 0, rope.head_dim * sizeof few[0]);
        for (int64_t head = 0; head < of.heads; ++head) {
          backward_head<E>(rope, static_cast<const float*>(of.weight),
                           normed ? head_at<const T>(of.x, of.x_strides, batch, token, head) : nullptr,
                           head_at<const T>(of.grad, of.grad_strides, batch, token, head), cos, sin,
                           head_at<T>(of.out, of.out_strides, batch, token, head), sums ? few : nullptr);
        }
        for (int64_t i = 0; sums && i < rope.head_dim; ++i) grad_weights[side * rope.head_dim + i] += few[i];
      });
}

}  // namespace

extern const kernels::RopeTable rope;
const kernels::RopeTable rope{forward<Float>,  forward<BFloat16>,  forward<Half>,
                              backward<Float>, backward<BFloat16>, backward<Half>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
