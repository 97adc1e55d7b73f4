#pragma once

// CUDA kernels for activation(gate) * up and its gradients. An activation is a struct that is constructed
// from a number x: of() returns activation(x), and slope() its derivative. Memory bandwidth limits these
// kernels, so a thread reads 16 bytes of each input. Backward also writes the product activation(gate) * up
// if the caller wants it, since it reads gate and up anyway. If `up` is null, it counts as 1, and
// grad_up, unless it is null, receives activation(gate).

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "layers/gated_table.h"

namespace shoestring::cuda {
namespace {

constexpr int kThreads = 256;

// The logistic function of x (in `of`) and of -x (in `of_negative`), both without cancellation.
struct Logistic {
  float of, of_negative;
  explicit __device__ Logistic(float x) {
    const float small = expf(-fabsf(x)), larger = 1 / (1 + small), smaller = small * larger;
    of = x < 0 ? smaller : larger;
    of_negative = x < 0 ? larger : smaller;
  }
};

// Reads or writes elements [i, i + N) of an array of `count` elements, except those after the end of the
// array. N is 1 if one of the arrays does not begin at a multiple of 16 bytes.
template <int N, class T>
__device__ Vector<T, N> read(const T* x, int64_t i, int64_t count) {
  if (i + N <= count) return load<N>(x + i);
  Vector<T, N> v;
#pragma unroll
  for (int k = 0; k < N; ++k) v[k] = i + k < count ? x[i + k] : rounded<T>(0.f);
  return v;
}
template <int N, class T>
__device__ void write(T* x, int64_t i, int64_t count, const Vector<T, N>& v) {
  if (i + N <= count) return store(x + i, v);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (i + k < count) x[i + k] = v[k];
  }
}

// Budget: 64 registers, 0 bytes shared, no spills.
template <class A, class T, int N>
__global__ void __launch_bounds__(kThreads) forward(const T* gate, const T* up, int64_t count, T* out) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (i >= count) return;
  const auto g = read<N>(gate, i, count);
  Vector<T, N> u, h;
  if (up != nullptr) u = read<N>(up, i, count);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float value = A(to_float(g[k])).of();
    h[k] = rounded<T>(up == nullptr ? value : value * to_float(u[k]));
  }
  write(out, i, count, h);
}

// Budget: 72 registers, 0 bytes shared, no spills.
template <class A, class T, int N>
__global__ void __launch_bounds__(kThreads)
    backward(const T* grad, const T* gate, const T* up, int64_t count, T* grad_gate, T* grad_up, T* out) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (i >= count) return;
  const auto d = read<N>(grad, i, count), g = read<N>(gate, i, count);
  Vector<T, N> u, by_gate, by_up, h;
  if (up != nullptr) u = read<N>(up, i, count);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float x = to_float(g[k]), y = up == nullptr ? 1 : to_float(u[k]), upstream = to_float(d[k]);
    const A activation(x);
    h[k] = rounded<T>(activation.of() * y);
    by_up[k] = rounded<T>(up == nullptr ? activation.of() : upstream * activation.of());
    by_gate[k] = rounded<T>(upstream * y * activation.slope());
  }
  write(grad_gate, i, count, by_gate);
  if (grad_up != nullptr) write(grad_up, i, count, by_up);
  if (out != nullptr) write(out, i, count, h);
}

template <class Kernel, class... Args>
const char* start(Kernel kernel, int64_t count, int width, void* stream, Args... args) {
  const int64_t tile = int64_t{kThreads} * width;
  return launch(kernel, (count + tile - 1) / tile, kThreads, 0, stream, args...);
}

template <class A, class T>
const char* run_forward(const void* gate, const void* up, int64_t count, void* out, void* stream) {
  constexpr int kVector = 16 / sizeof(T);
  const bool vectors = aligned(gate) && aligned(up) && aligned(out);
  return start(vectors ? forward<A, T, kVector> : forward<A, T, 1>, count, vectors ? kVector : 1, stream,
               static_cast<const T*>(gate), static_cast<const T*>(up), count, static_cast<T*>(out));
}

template <class A, class T>
const char* run_backward(const void* grad, const void* gate, const void* up, int64_t count, void* grad_gate,
                         void* grad_up, void* out, void* stream) {
  constexpr int kVector = 16 / sizeof(T);
  const bool vectors = aligned(grad) && aligned(gate) && aligned(up) && aligned(grad_gate) &&
                       aligned(grad_up) && aligned(out);  // a null pointer counts as aligned
  return start(vectors ? backward<A, T, kVector> : backward<A, T, 1>, count, vectors ? kVector : 1, stream,
               static_cast<const T*>(grad), static_cast<const T*>(gate), static_cast<const T*>(up), count,
               static_cast<T*>(grad_gate), static_cast<T*>(grad_up), static_cast<T*>(out));
}

template <class A>
constexpr kernels::GatedCuda gated_table() {
  return {run_forward<A, float>,  run_forward<A, __nv_bfloat16>,  run_forward<A, __half>,
          run_backward<A, float>, run_backward<A, __nv_bfloat16>, run_backward<A, __half>};
}

}  // namespace
}  // namespace shoestring::cuda
