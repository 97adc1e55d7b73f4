#pragma once

// Vectorised loops that compute activation(gate) * up and its gradients. An activation is a struct
// constructed from a register of inputs: of() returns its values and slope() its derivatives. For 16-bit
// dtypes (kShort), a relative error of 2^-15 is good enough. Backward is one pass over its inputs, which also
// computes activation(gate) * up if the caller wants it. Without kUp, the loops compute activation(gate).

#include "core/element_simd.h"
#include "core/exp_simd.h"
#include "layers/gated_table.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

template <bool kShort>
SHOESTRING_INLINE F32 decay(F32 x) {
  return kShort ? short_exp_of_negative(x) : exp_of_negative(x);
}

// Computes the logistic function of x (`of`) and of -x (`of_negative`), without cancellation in either.
template <bool kShort>
struct Logistic {
  F32 of, of_negative;
  explicit SHOESTRING_METHOD Logistic(F32 x) {
    const F32 small = decay<kShort>(-abs(x)), larger = reciprocal(1.f + small), smaller = small * larger;
    of = x < 0.f ? smaller : larger;
    of_negative = x < 0.f ? larger : smaller;
  }
};

constexpr int64_t kGatedStep = 2 * kLanes;
// Number of bytes by which prefetches run ahead of a loop. The prefetcher of some CPUs is too late for loops
// over three arrays, above all if results are written over inputs: half of the time was spent waiting.
constexpr int64_t kGatedAhead = 2048;

template <class T>
SHOESTRING_INLINE void ask_for_step(const T* p) {
  ask_for(p, kGatedAhead / static_cast<int64_t>(sizeof(T)), kGatedStep);
}

template <class A, class E, bool kUp, class T>
SHOESTRING_INLINE void forward_step(const T* gate, const T* up, T* out) {
  const Pair g = E::load_pair(gate);
  if (!kUp) return E::store_pair(out, {A(g.first).of(), A(g.second).of()});
  const Pair u = E::load_pair(up);
  E::store_pair(out, {A(g.first).of() * u.first, A(g.second).of() * u.second});
}

// Computes activation(gate) * up for `count` elements, kGatedStep at a time. Fewer elements at the end are
// copied to buffers of kGatedStep elements and computed there.
template <class A, class E, bool kUp, class T>
SHOESTRING_INLINE void forward_loop(const T* gate, const T* up, int64_t count, T* out) {
  int64_t i = 0;
  for (; i + kGatedStep <= count; i += kGatedStep) {
    ask_for_step(gate + i);
    if (kUp) ask_for_step(up + i);
    forward_step<A, E, kUp>(gate + i, kUp ? up + i : nullptr, out + i);
  }
  if (i == count) return;
  T g[kGatedStep] = {}, u[kGatedStep] = {}, o[kGatedStep];
  __builtin_memcpy(g, gate + i, (count - i) * sizeof(T));
  if (kUp) __builtin_memcpy(u, up + i, (count - i) * sizeof(T));
  forward_step<A, E, kUp>(g, u, o);
  __builtin_memcpy(out + i, o, (count - i) * sizeof(T));
}
template <class A, class E, class T>
void gated_forward(const T* gate, const T* up, int64_t count, T* out) {
  if (up == nullptr) return forward_loop<A, E, false>(gate, up, count, out);
  forward_loop<A, E, true>(gate, up, count, out);
}

struct GatedGradients {
  F32 gate, up, out;
};
template <class A>
SHOESTRING_INLINE GatedGradients gradients_of(F32 upstream, F32 gate, F32 up) {
  const A activation(gate);
  const F32 value = activation.of();
  return {upstream * up * activation.slope(), upstream * value, value * up};
}

template <class A, class E, bool kUp, class T>
SHOESTRING_INLINE void backward_step(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up,
                                     T* out) {
  const Pair d = E::load_pair(grad), g = E::load_pair(gate);
  if (!kUp) {
    const A first(g.first), second(g.second);
    E::store_pair(grad_gate, {d.first * first.slope(), d.second * second.slope()});
    if (grad_up != nullptr) E::store_pair(grad_up, {first.of(), second.of()});
    return;
  }
  const Pair u = E::load_pair(up);
  const GatedGradients a = gradients_of<A>(d.first, g.first, u.first),
                       b = gradients_of<A>(d.second, g.second, u.second);
  E::store_pair(grad_gate, {a.gate, b.gate});
  E::store_pair(grad_up, {a.up, b.up});
  if (out != nullptr) E::store_pair(out, {a.out, b.out});
}

template <class A, class E, bool kUp, class T>
SHOESTRING_INLINE void backward_loop(const T* grad, const T* gate, const T* up, int64_t count, T* grad_gate,
                                     T* grad_up, T* out) {
  int64_t i = 0;
  for (; i + kGatedStep <= count; i += kGatedStep) {
    ask_for_step(grad + i);
    ask_for_step(gate + i);
    if (kUp) ask_for_step(up + i);
    backward_step<A, E, kUp>(grad + i, gate + i, kUp ? up + i : nullptr, grad_gate + i,
                             grad_up == nullptr ? nullptr : grad_up + i, out == nullptr ? nullptr : out + i);
  }
  if (i == count) return;
  T d[kGatedStep] = {}, g[kGatedStep] = {}, u[kGatedStep] = {}, o[kGatedStep];
  const int64_t bytes = (count - i) * static_cast<int64_t>(sizeof(T));
  __builtin_memcpy(d, grad + i, bytes);
  __builtin_memcpy(g, gate + i, bytes);
  if (kUp) __builtin_memcpy(u, up + i, bytes);
  backward_step<A, E, kUp>(d, g, u, g, d, o);
  __builtin_memcpy(grad_gate + i, g, bytes);
  if (grad_up != nullptr) __builtin_memcpy(grad_up + i, d, bytes);
  if (out != nullptr) __builtin_memcpy(out + i, o, bytes);
}
template <class A, class E, class T>
void gated_backward(const T* grad, const T* gate, const T* up, int64_t count, T* grad_gate, T* grad_up,
                    T* out) {
  if (up == nullptr) return backward_loop<A, E, false, T>(grad, gate, up, count, grad_gate, grad_up, nullptr);
  backward_loop<A, E, true>(grad, gate, up, count, grad_gate, grad_up, out);
}

template <template <bool kShort> class A>
constexpr kernels::GatedTable gated_table() {
  return {gated_forward<A<false>, Float, float>,       gated_forward<A<true>, BFloat16, uint16_t>,
          gated_forward<A<true>, Half, uint16_t>,      gated_backward<A<false>, Float, float>,
          gated_backward<A<true>, BFloat16, uint16_t>, gated_backward<A<true>, Half, uint16_t>};
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
