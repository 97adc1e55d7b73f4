#pragma once

// Loops over activation(gate) * up. An activation is a struct made of a register of numbers, with of(), its value, and
// slope(), its derivative. One pass: backward makes the product again where somebody needs it, from what it reads for the
// gradients anyway.

#include "cpu/element.h"
#include "kernels/gated.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

// The logistic function of x and of -x, each without cancellation.
struct Logistic {
  F32 of, of_negative;
  explicit SHOESTRING_METHOD Logistic(F32 x) {
    const F32 small = exp(-abs(x)), larger = 1.f / (1.f + small), smaller = small * larger;
    of = x < 0.f ? smaller : larger;
    of_negative = x < 0.f ? larger : smaller;
  }
};

constexpr int64_t kGatedStep = 2 * kLanes;

// The elements behind the last whole step are copied to and from buffers.
template <class A, class E, class T>
void gated_forward(const T* gate, const T* up, int64_t count, T* out) {
  const auto step = [](const T* g, const T* u, T* o) __attribute__((always_inline)) {
    F32 h[2];
    for (int k = 0; k < 2; ++k) {
      h[k] = A(E::load(g + k * kLanes)).of() * E::load(u + k * kLanes);
    }
    E::store(o, h[0], h[1]);
  };
  int64_t i = 0;
  for (; i + kGatedStep <= count; i += kGatedStep) step(gate + i, up + i, out + i);
  if (i == count) return;
  T g[kGatedStep] = {}, u[kGatedStep] = {}, o[kGatedStep];
  __builtin_memcpy(g, gate + i, (count - i) * sizeof(T));
  __builtin_memcpy(u, up + i, (count - i) * sizeof(T));
  step(g, u, o);
  __builtin_memcpy(out + i, o, (count - i) * sizeof(T));
}

template <class A, class E, class T>
void gated_backward(const T* grad, const T* gate, const T* up, int64_t count, T* grad_gate, T* grad_up, T* out) {
  const auto step = [](const T* d, const T* g, const T* u, T* dg, T* du, T* o) __attribute__((always_inline)) {
    F32 by_gate[2], by_up[2], h[2];
    for (int k = 0; k < 2; ++k) {
      const F32 x = E::load(g + k * kLanes), y = E::load(u + k * kLanes), upstream = E::load(d + k * kLanes);
      const A activation(x);
      h[k] = activation.of() * y;
      by_up[k] = upstream * activation.of();
      by_gate[k] = upstream * y * activation.slope();
    }
    E::store(dg, by_gate[0], by_gate[1]);
    E::store(du, by_up[0], by_up[1]);
    if (o != nullptr) E::store(o, h[0], h[1]);
  };
  int64_t i = 0;
  for (; i + kGatedStep <= count; i += kGatedStep) {
    step(grad + i, gate + i, up + i, grad_gate + i, grad_up + i, out == nullptr ? nullptr : out + i);
  }
  if (i == count) return;
  T d[kGatedStep] = {}, g[kGatedStep] = {}, u[kGatedStep] = {}, o[kGatedStep];
  const int64_t bytes = (count - i) * static_cast<int64_t>(sizeof(T));
  __builtin_memcpy(d, grad + i, bytes);
  __builtin_memcpy(g, gate + i, bytes);
  __builtin_memcpy(u, up + i, bytes);
  step(d, g, u, g, d, o);
  __builtin_memcpy(grad_gate + i, g, bytes);
  __builtin_memcpy(grad_up + i, d, bytes);
  if (out != nullptr) __builtin_memcpy(out + i, o, bytes);
}

template <class A>
constexpr kernels::GatedTable gated_table() {
  return {gated_forward<A, Float, float>,  gated_forward<A, BFloat16, uint16_t>,  gated_forward<A, Half, uint16_t>,
          gated_backward<A, Float, float>, gated_backward<A, BFloat16, uint16_t>, gated_backward<A, Half, uint16_t>};
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
