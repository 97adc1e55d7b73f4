// One pass: backward makes the product again where somebody needs it, from what it reads for the gradients anyway.

#include "kernels/swiglu.h"

#include "cpu/element.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

// The logistic function of x and of -x, each without cancellation.
struct Logistic {
  F32 of, of_negative;
  explicit SHOESTRING_METHOD Logistic(F32 x) {
    const F32 small = exp(-abs(x)), larger = 1.f / (1.f + small), smaller = small * larger;
    of = x < 0.f ? smaller : larger;
    of_negative = x < 0.f ? larger : smaller;
  }
};

constexpr int64_t kStep = 2 * kLanes;

// The elements behind the last whole step are copied to and from buffers.
template <class E, class T>
void forward(const T* gate, const T* up, int64_t count, T* out) {
  const auto step = [](const T* g, const T* u, T* o) __attribute__((always_inline)) {
    F32 h[2];
    for (int k = 0; k < 2; ++k) {
      const F32 x = E::load(g + k * kLanes);
      h[k] = x * Logistic(x).of * E::load(u + k * kLanes);
    }
    E::store(o, h[0], h[1]);
  };
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) step(gate + i, up + i, out + i);
  if (i == count) return;
  T g[kStep] = {}, u[kStep] = {}, o[kStep];
  __builtin_memcpy(g, gate + i, (count - i) * sizeof(T));
  __builtin_memcpy(u, up + i, (count - i) * sizeof(T));
  step(g, u, o);
  __builtin_memcpy(out + i, o, (count - i) * sizeof(T));
}

template <class E, class T>
void backward(const T* grad, const T* gate, const T* up, int64_t count, T* grad_gate, T* grad_up, T* out) {
  const auto step = [](const T* d, const T* g, const T* u, T* dg, T* du, T* o) __attribute__((always_inline)) {
    F32 by_gate[2], by_up[2], h[2];
    for (int k = 0; k < 2; ++k) {
      const F32 x = E::load(g + k * kLanes), y = E::load(u + k * kLanes), upstream = E::load(d + k * kLanes);
      const Logistic s(x);
      const F32 silu = x * s.of;
      h[k] = silu * y;
      by_up[k] = upstream * silu;
      by_gate[k] = upstream * y * (s.of + silu * s.of_negative);
    }
    E::store(dg, by_gate[0], by_gate[1]);
    E::store(du, by_up[0], by_up[1]);
    if (o != nullptr) E::store(o, h[0], h[1]);
  };
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    step(grad + i, gate + i, up + i, grad_gate + i, grad_up + i, out == nullptr ? nullptr : out + i);
  }
  if (i == count) return;
  T d[kStep] = {}, g[kStep] = {}, u[kStep] = {}, o[kStep];
  const int64_t bytes = (count - i) * static_cast<int64_t>(sizeof(T));
  __builtin_memcpy(d, grad + i, bytes);
  __builtin_memcpy(g, gate + i, bytes);
  __builtin_memcpy(u, up + i, bytes);
  step(d, g, u, g, d, o);
  __builtin_memcpy(grad_gate + i, g, bytes);
  __builtin_memcpy(grad_up + i, d, bytes);
  if (out != nullptr) __builtin_memcpy(out + i, o, bytes);
}

}  // namespace

extern const kernels::SwigluTable swiglu;
const kernels::SwigluTable swiglu{forward<Float, float>,       forward<BFloat16, uint16_t>,  forward<Half, uint16_t>,
                                  backward<Float, float>,      backward<BFloat16, uint16_t>, backward<Half, uint16_t>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
