#pragma once

// The names of CUDA C++ that kernels use, implemented for g++ (see ../README.md).

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "simt.h"

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __shared__ static thread_local  // the emulator looks for shared variables in thread-local storage

#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index())
#define blockDim (simt::block_size())
#define gridDim (simt::grid_size())

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- operations of the threads of a block, or of the lanes of a warp
inline void __syncthreads(simt::Where where = simt::Where::current()) {
  simt::barrier(0, 0, "__syncthreads", where);
}
inline int __syncthreads_or(int x, simt::Where where = simt::Where::current()) {
  return simt::barrier_reduce(x != 0, [](int a, int b) { return a | b; }, "__syncthreads_or", where);
}
inline int __syncthreads_and(int x, simt::Where where = simt::Where::current()) {
  return simt::barrier_reduce(x != 0, [](int a, int b) { return a & b; }, "__syncthreads_and", where);
}
inline int __syncthreads_count(int x, simt::Where where = simt::Where::current()) {
  return simt::barrier_reduce(x != 0, [](int a, int b) { return a + b; }, "__syncthreads_count", where);
}
inline void __syncwarp(unsigned mask = 0xffffffff, simt::Where where = simt::Where::current()) {
  simt::warp_collective("__syncwarp", mask, nullptr, nullptr, [](auto, unsigned, int, void*) {}, true, where);
}

namespace simt {

// One lane's input to a shuffle: the value that it offers, and the lane whose value it reads.
template <class T>
struct Shuffle {
  T value;
  int source;
};

template <class T>
SIMT_UNCHECKED T shuffle(const char* name, unsigned mask, T value, int source, Where where) {
  check_source(name, mask, source, where);
  Shuffle<T> in{value, source};
  T out;
  warp_collective(
      name, mask, &in, &out,
      [](const void* const in[32], unsigned, int lane, void* out) SIMT_UNCHECKED {
        const auto* const* lanes = reinterpret_cast<const Shuffle<T>* const*>(in);
        *static_cast<T*>(out) = lanes[lanes[lane]->source]->value;
      },
      false, where);
  return out;
}

inline int own_lane() { return static_cast<int>(thread_index().x % 32); }

// Votes and reductions: combines the values of the lanes in the mask, in ascending order of lanes. The
// arguments of `Combine` are the result so far, a value, the value's lane, the calling lane's own value, and
// whether this is the first value.
template <class T, class R, class Combine>
SIMT_UNCHECKED R fold(const char* name, unsigned mask, T value, R, Combine, Where where) {
  R out;
  warp_collective(
      name, mask, &value, &out,
      [](const void* const in[32], unsigned mask, int lane, void* out) SIMT_UNCHECKED {
        const T own = *static_cast<const T*>(in[lane]);
        R result{};
        bool first = true;
        for (int l = 0; l < 32; ++l) {
          if ((mask >> l & 1) == 0) continue;
          result = Combine{}(result, *static_cast<const T*>(in[l]), l, own, first);
          first = false;
        }
        *static_cast<R*>(out) = result;
      },
      false, where);
  return out;
}

}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T x, int lane, int width = 32, simt::Where where = simt::Where::current()) {
  const int own = simt::own_lane();
  return simt::shuffle("__shfl_sync", mask, x, own / width * width + (lane & (width - 1)), where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32, simt::Where where = simt::Where::current()) {
  const int own = simt::own_lane(), source = own ^ lanes;
  return simt::shuffle("__shfl_xor_sync", mask, x, source < (own / width + 1) * width ? source : own, where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, int lanes, int width = 32, simt::Where where = simt::Where::current()) {
  const int own = simt::own_lane(), source = own - lanes;
  return simt::shuffle("__shfl_up_sync", mask, x, source >= own / width * width ? source : own, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, int lanes, int width = 32,
                   simt::Where where = simt::Where::current()) {
  const int own = simt::own_lane(), source = own + lanes;
  return simt::shuffle("__shfl_down_sync", mask, x, source < (own / width + 1) * width ? source : own, where);
}

inline unsigned __ballot_sync(unsigned mask, int x, simt::Where where = simt::Where::current()) {
  return simt::fold(
      "__ballot_sync", mask, x, 0u,
      [](unsigned r, int v, int lane, int, bool) { return r | unsigned{v != 0} << lane; }, where);
}
inline int __any_sync(unsigned mask, int x, simt::Where where = simt::Where::current()) {
  return simt::fold(
      "__any_sync", mask, x, 0, [](int r, int v, int, int, bool) { return int{r || v}; }, where);
}
inline int __all_sync(unsigned mask, int x, simt::Where where = simt::Where::current()) {
  return simt::fold(
      "__all_sync", mask, x, 0, [](int r, int v, int, int, bool first) { return int{(first || r) && v}; },
      where);
}
template <class T>
unsigned __match_any_sync(unsigned mask, T x, simt::Where where = simt::Where::current()) {
  return simt::fold(
      "__match_any_sync", mask, x, 0u,
      [](unsigned r, T v, int lane, T own, bool) { return r | unsigned{v == own} << lane; }, where);
}
#define SIMT_REDUCE(NAME, T, EXPRESSION)                                                                    \
  inline T NAME(unsigned mask, T x, simt::Where where = simt::Where::current()) {                           \
    return simt::fold(                                                                                      \
        #NAME, mask, x, T{}, [](T r, T v, int, T, bool first) { return first ? v : (EXPRESSION); }, where); \
  }
SIMT_REDUCE(__reduce_add_sync, unsigned, r + v)
SIMT_REDUCE(__reduce_max_sync, unsigned, std::max(r, v))
SIMT_REDUCE(__reduce_min_sync, unsigned, std::min(r, v))
SIMT_REDUCE(__reduce_or_sync, unsigned, r | v)
SIMT_REDUCE(__reduce_and_sync, unsigned, r& v)
SIMT_REDUCE(__reduce_add_sync, int, r + v)
SIMT_REDUCE(__reduce_max_sync, int, std::max(r, v))
SIMT_REDUCE(__reduce_min_sync, int, std::min(r, v))

// ---- memory
inline void __threadfence() {}
inline void __threadfence_block() {}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T x) {
  *p = x;
}
template <class T>
void __stcg(T* p, T x) {
  *p = x;
}

namespace simt {
template <class T, class Change>
SIMT_UNCHECKED T atomic(T* p, Change change, Where where) {
  check_atomic(p, sizeof(T), where);
  const T old = *p;
  *p = change(old);
  return old;
}
}  // namespace simt
#define SIMT_ATOMIC(NAME, EXPRESSION)                                                   \
  template <class T>                                                                    \
  T NAME(T* p, std::type_identity_t<T> x, simt::Where where = simt::Where::current()) { \
    return simt::atomic(p, [x](T old) { return static_cast<T>(EXPRESSION); }, where);   \
  }
SIMT_ATOMIC(atomicAdd, old + x)
SIMT_ATOMIC(atomicSub, old - x)
SIMT_ATOMIC(atomicMax, std::max(old, x))
SIMT_ATOMIC(atomicMin, std::min(old, x))
SIMT_ATOMIC(atomicOr, old | x)
SIMT_ATOMIC(atomicAnd, old& x)
SIMT_ATOMIC(atomicXor, old ^ x)
SIMT_ATOMIC(atomicExch, (static_cast<void>(old), x))
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> x,
            simt::Where where = simt::Where::current()) {
  return simt::atomic(p, [=](T old) { return old == expected ? x : old; }, where);
}

// ---- arithmetic
// nvcc may fuse a multiplication and an addition into an fma, but never the intrinsics __fadd_rn, __fmul_rn
// and the like. g++ fuses nothing on the processors for which the emulator is built, so plain operators are
// right.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
// Approximate functions, with the bounds that NVIDIA documents for them: see Approximation in simt.h.
#define SIMT_APPROXIMATE(NAME, ULPS, LEAST, EXPRESSION)     \
  inline float NAME(float argument) {                       \
    const float x = simt::argument_of(argument);            \
    return simt::approximate((EXPRESSION), x, ULPS, LEAST); \
  }
SIMT_APPROXIMATE(simt_rcp_approx, 1, 0, 1 / x)
SIMT_APPROXIMATE(simt_sqrt_approx, 1, 0, std::sqrt(x))
SIMT_APPROXIMATE(simt_ex2_approx, 2, 0, x == 0 ? 1 : std::exp2(x))
SIMT_APPROXIMATE(simt_lg2_approx, 2, 0x1p-23f, std::log2(x))
SIMT_APPROXIMATE(rsqrtf, 2, 0, 1 / std::sqrt(x))
SIMT_APPROXIMATE(__expf, 2 + static_cast<int>(std::fabs(1.173f * x)), 0, std::exp(x))
SIMT_APPROXIMATE(__logf, 3, 0x1p-23f, std::log(x))
inline float __exp2f(float x) { return simt_ex2_approx(x); }
inline float __log2f(float x) { return simt_lg2_approx(x); }
inline float __fdividef(float a, float b) { return simt::approximate(a / simt::argument_of(b), b, 2); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
inline unsigned __float2uint_rz(float x) { return static_cast<unsigned>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long all = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 15;
    unsigned byte = static_cast<unsigned>(all >> (8 * (s & 7)) & 255);
    if (s & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(hi) << 32 | lo) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(hi) << 32 | lo) << (shift & 31) >> 32);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
auto max(A a, B b) {
  return std::max<std::common_type_t<A, B>>(a, b);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
auto min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}

// ---- functions of the CUDA runtime that the host code in the kernels' source files calls
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const simt::Gpu& gpu = simt::gpu();
  *value = which == cudaDevAttrComputeCapabilityMajor         ? gpu.capability / 10
           : which == cudaDevAttrComputeCapabilityMinor       ? gpu.capability % 10
           : which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? gpu.shared_bytes
                                                              : gpu.multiprocessors;
  return cudaSuccess;
}
