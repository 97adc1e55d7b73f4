#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace shoestring::cuda {

/// N values that are loaded or stored together, with one access of up to 16 bytes or several of 16 bytes. The
/// address must be a multiple of the vector's size; for vectors above 16 bytes, a multiple of 16.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
  T value[N];
  __device__ T& operator[](int i) { return value[i]; }
  __device__ const T& operator[](int i) const { return value[i]; }
};

template <int N, class T>
__device__ Vector<T, N> load(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

template <int N, class T>
__device__ void store(T* to, const Vector<T, N>& v) {
  *reinterpret_cast<Vector<T, N>*>(to) = v;
}

/// Returns true if `p` is a multiple of `bytes`, a power of two.
inline bool aligned(const void* p, int bytes = 16) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace shoestring::cuda
