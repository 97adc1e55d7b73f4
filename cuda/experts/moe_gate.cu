// The gates of experts on CUDA. A warp computes a row.

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/core/elementwise_math.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "cuda/layers/gelu.h"
#include "experts/moe_gate_rule.h"
#include "experts/moe_gate_table.h"
#include "layers/swiglu_rule.h"

namespace shoestring::cuda {
namespace {

using kernels::Gate;
using kernels::GateKind;

constexpr int kGateThreads = 128;

__device__ inline int64_t gate_row() { return int64_t{blockIdx.x} * (kGateThreads / kWarp) + warp(); }

// N features of both halves.
template <class T, int N>
struct Halves {
  Vector<T, N> g, u;
};

// Loads features of both halves from feature i of a row on.
template <int N, class T>
__device__ Halves<T, N> load_halves(const Gate& gate, const T* h, int64_t features, int64_t i) {
  if (!gate.interleaved) return {load<N>(h + i), load<N>(h + features + i)};
  const auto all = load<2 * N>(h + 2 * i);
  Halves<T, N> halves;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    halves.g[k] = all[2 * k];
    halves.u[k] = all[2 * k + 1];
  }
  return halves;
}

template <int N, class T>
__device__ void store_halves(const Gate& gate, const Halves<T, N>& x, int64_t features, int64_t i, T* h) {
  if (!gate.interleaved) {
    store(h + i, x.g);
    store(h + features + i, x.u);
    return;
  }
  Vector<T, 2 * N> all;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    all[2 * k] = x.g[k];
    all[2 * k + 1] = x.u[k];
  }
  store(h + 2 * i, all);
}

// A feature of both halves, clamped, and its activation. NaN stays NaN.
template <class A>
struct GatedFeature {
  __device__ GatedFeature(float g, float u, float limit)
      : up(ElementwiseMath::clamp(u, -limit, limit) + kernels::kOffset<A>),
        activation(A::at(g > limit ? limit : g, ElementwiseMath())) {}
  float up;
  Activation<float> activation;
};

// Budget: 64 registers, 0 bytes shared, no spills.
template <class A, class T, int N>
__global__ void __launch_bounds__(kGateThreads)
    gate_forward(Gate gate, const T* h, int64_t slots, int64_t features, T* a) {
  const int64_t row = gate_row();
  if (row >= slots) return;
  h += 2 * row * features;
  a += row * features;
  for (int64_t i = lane() * N; i < features; i += kWarp * N) {
    const auto x = load_halves<N>(gate, h, features, i);
    Vector<T, N> product;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const GatedFeature<A> of(to_float(x.g[k]), to_float(x.u[k]), gate.limit);
      product[k] = rounded<T>(of.activation.value * of.up);
    }
    store(a + i, product);
  }
}

// Budget: 80 registers, 0 bytes shared, no spills.
template <class A, class T, int N>
__global__ void __launch_bounds__(kGateThreads, 6)
    gate_backward(Gate gate, const T* h, const int64_t* order, const float* weight, int64_t slots,
                  int64_t features, T* grad, T* grad_h, float* along) {
  const int64_t row = gate_row();
  if (row >= slots) return;
  h += 2 * row * features;
  grad += row * features;
  grad_h += 2 * row * features;
  const int slot = static_cast<int>(order[row]);  // the products of slots count them in int
  const float factor = weight[slot];
  float sum = 0;
  for (int64_t i = lane() * N; i < features; i += kWarp * N) {
    const auto x = load_halves<N>(gate, h, features, i);
    auto upstream = load<N>(grad + i);
    Halves<T, N> slope;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float g = to_float(x.g[k]), u = to_float(x.u[k]), given = to_float(upstream[k]);
      const GatedFeature<A> of(g, u, gate.limit);
      const float product = of.activation.value * of.up, weighted = factor * given;
      sum += given * product;
      slope.g[k] = rounded<T>(g > gate.limit ? 0.f : weighted * of.up * of.activation.slope);
      slope.u[k] = rounded<T>(fabsf(u) > gate.limit ? 0.f : weighted * of.activation.value);
      upstream[k] = rounded<T>(factor * product);
    }
    store(grad + i, upstream);
    store_halves(gate, slope, features, i, grad_h);
  }
  sum = warp_reduce(sum, [](float x, float y) { return x + y; });
  if (lane() == 0) along[slot] = sum;
}

// Calls body(activation) with an object of the activation's type.
template <class Body>
const char* with_activation(GateKind kind, Body body) {
  switch (kind) {
    case GateKind::kGelu:
      return body(GeluErf());
    case GateKind::kGeluTanh:
      return body(GeluTanh());
    case GateKind::kSwigluOai:
      return body(kernels::SiluOai());
    default:
      return body(kernels::Silu());
  }
}

int64_t gate_blocks(int64_t slots) { return (slots * kWarp + kGateThreads - 1) / kGateThreads; }

template <class T>
constexpr int kGateVector = 16 / sizeof(T);

template <class T>
const char* run_forward(const Gate& gate, const void* h, int64_t slots, int64_t features, void* a,
                        void* stream) {
  const bool vectors = aligned(h) && aligned(a) && features % kGateVector<T> == 0;
  return with_activation(gate.kind, [&](auto kind) {
    using A = decltype(kind);
    const auto kernel = vectors ? gate_forward<A, T, kGateVector<T>> : gate_forward<A, T, 1>;
    return launch(kernel, gate_blocks(slots), kGateThreads, 0, stream, gate, static_cast<const T*>(h), slots,
                  features, static_cast<T*>(a));
  });
}

template <class T>
const char* run_backward(const Gate& gate, const void* h, const int64_t* order, const float* weight,
                         int64_t slots, int64_t features, void* grad, void* grad_h, float* along,
                         void* stream) {
  const bool vectors = aligned(h) && aligned(grad) && aligned(grad_h) && features % kGateVector<T> == 0;
  return with_activation(gate.kind, [&](auto kind) {
    using A = decltype(kind);
    const auto kernel = vectors ? gate_backward<A, T, kGateVector<T>> : gate_backward<A, T, 1>;
    return launch(kernel, gate_blocks(slots), kGateThreads, 0, stream, gate, static_cast<const T*>(h), order,
                  weight, slots, features, static_cast<T*>(grad), static_cast<T*>(grad_h), along);
  });
}

template <class T>
constexpr kernels::GateCuda::Kernels of_gates() {
  return {run_forward<T>, run_backward<T>};
}

const kernels::GateCuda kTable{of_gates<float>(), of_gates<__nv_bfloat16>(), of_gates<__half>()};
const bool kProvided = (provide("moe_gate", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
