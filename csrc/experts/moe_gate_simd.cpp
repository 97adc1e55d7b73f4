// The gates of experts on the CPU, row by row.

#include "experts/moe_gate_table.h"

#include <algorithm>
#include <limits>

#include "core/elementwise_simd.h"
#include "core/some_simd.h"
#include "experts/moe_gate_rule.h"
#include "layers/gelu_simd.h"
#include "layers/swiglu_rule.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::Activation;
using kernels::Gate;
using kernels::GateKind;
using kernels::kOffset;
using kernels::SiluOai;
using Group = Some<2>;  // kElementwiseStep features in memory order

struct Halves {
  Group g, u;
};

// Loads `count` features of both halves from feature i of a row on.
template <class E>
SHOESTRING_INLINE Halves load_halves(const Gate& gate, const typename E::Type* h, int64_t features, int64_t i,
                                     int64_t count) {
  if (!gate.interleaved) return {get_some<E, 2>(h + i, count), get_some<E, 2>(h + features + i, count)};
  const auto all = get_some<E, 4>(h + 2 * i, 2 * count);
  const Pair low = BFloat16::as_pair({all.value[0], all.value[1]}),
             high = BFloat16::as_pair({all.value[2], all.value[3]});
  return {{{low.first, high.first}}, {{low.second, high.second}}};
}

template <class E>
SHOESTRING_INLINE void store_halves(const Gate& gate, const Halves& x, int64_t features, int64_t i,
                                    int64_t count, typename E::Type* h) {
  if (!gate.interleaved) {
    put_some<E>(h + i, x.g, count);
    put_some<E>(h + features + i, x.u, count);
    return;
  }
  const Pair low = BFloat16::in_order({x.g.value[0], x.u.value[0]}),
             high = BFloat16::in_order({x.g.value[1], x.u.value[1]});
  put_some<E>(h + 2 * i, Some<4>{{low.first, low.second, high.first, high.second}}, 2 * count);
}

// A register of both halves, clamped, and its activation.
template <class E, class A>
struct Gated {
  SHOESTRING_METHOD Gated(F32 g, F32 u, F32 limit)
      : up(min(limit, max(-limit, u)) + kOffset<A>), activation(A::at(min(limit, g), math)) {}
  static constexpr ElementwiseMath<sizeof(typename E::Type) == 2> math{};

  F32 up;
  Activation<F32> activation;
};

template <class E, class A>
void forward_row(const Gate& gate, const void* h, int64_t features, void* a) {
  using T = typename E::Type;
  const F32 limit = splat(gate.limit);
  for (int64_t i = 0; i < features; i += kElementwiseStep) {
    const int64_t count = std::min(kElementwiseStep, features - i);
    const Halves x = load_halves<E>(gate, static_cast<const T*>(h), features, i, count);
    Group product;
    for (int k = 0; k < 2; ++k) {
      const Gated<E, A> of(x.g.value[k], x.u.value[k], limit);
      product.value[k] = of.activation.value * of.up;
    }
    put_some<E>(static_cast<T*>(a) + i, product, count);
  }
}

template <class E, class A>
float backward_row(const Gate& gate, const void* h, float weight, int64_t features, void* grad,
                   void* grad_h) {
  using T = typename E::Type;
  const F32 limit = splat(gate.limit), factor = splat(weight);
  F32 along[2] = {};
  for (int64_t i = 0; i < features; i += kElementwiseStep) {
    const int64_t count = std::min(kElementwiseStep, features - i);
    const Halves x = load_halves<E>(gate, static_cast<const T*>(h), features, i, count);
    T* to = static_cast<T*>(grad) + i;
    Group upstream = get_some<E, 2>(to, count);
    Halves slope;
    for (int k = 0; k < 2; ++k) {
      const F32 g = x.g.value[k], u = x.u.value[k];
      const Gated<E, A> of(g, u, limit);
      const F32 product = of.activation.value * of.up, weighted = factor * upstream.value[k];
      along[k] = fma(upstream.value[k], product, along[k]);
      slope.g.value[k] = g > limit ? F32{} : weighted * of.up * of.activation.slope;
      slope.u.value[k] = abs(u) > limit ? F32{} : weighted * of.activation.value;
      upstream.value[k] = factor * product;
    }
    put_some<E>(to, upstream, count);
    store_halves<E>(gate, slope, features, i, count, static_cast<T*>(grad_h));
  }
  return horizontal_sum(along[0] + along[1]);
}

// Calls body(activation) with an object of the activation's type.
template <class Body>
SHOESTRING_INLINE auto with_activation(GateKind kind, Body body) {
  switch (kind) {
    case GateKind::kGelu:
      return body(GeluErf());
    case GateKind::kGeluTanh:
      return body(GeluTanh());
    case GateKind::kSwigluOai:
      return body(SiluOai());
    default:
      return body(kernels::Silu());
  }
}

template <class E>
void forward(const Gate& gate, const void* h, int64_t features, void* a) {
  with_activation(gate.kind, [&](auto kind) { forward_row<E, decltype(kind)>(gate, h, features, a); });
}

template <class E>
float backward(const Gate& gate, const void* h, float weight, int64_t features, void* grad, void* grad_h) {
  return with_activation(gate.kind, [&](auto kind) {
    return backward_row<E, decltype(kind)>(gate, h, weight, features, grad, grad_h);
  });
}

template <class E>
constexpr kernels::GateRows kGateRows{forward<E>, backward<E>};

}  // namespace

extern const kernels::GateTable moe_gate;
const kernels::GateTable moe_gate{kGateRows<Float>, kGateRows<BFloat16>, kGateRows<Half>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
