// Correct kernels, with the results that they must give under every order of the threads.

#include "cases.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "memory.h"

namespace simt_tests {
namespace {

using namespace shoestring::cuda;

__global__ void reduce(const int* in, int n, int* out) {
  __shared__ int partial[8];
  int sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) sum += in[i];
  sum = warp_reduce(sum, [](int a, int b) { return a + b; });
  if (lane() == 0) partial[warp()] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 8; ++i) sum += partial[i];
    *out = sum;
  }
}
__global__ void reverse(int* values) {  // reverses an array in place, through dynamic shared memory
  int* shared = reinterpret_cast<int*>(dynamic_shared());
  const int last = static_cast<int>(blockDim.x) - 1, i = static_cast<int>(threadIdx.x);
  shared[last - i] = values[i];
  __syncthreads();
  values[i] = shared[i];
}
__global__ void rotate_in_warp(int* out) {
  __shared__ int shared[64];
  const int first = warp() * kWarp;
  for (int round = 0; round < 3; ++round) {
    shared[threadIdx.x] = static_cast<int>(threadIdx.x) + round;
    __syncwarp();
    out[threadIdx.x] = shared[first + (lane() + 1) % kWarp];
    __syncwarp();
  }
}
// each half of a warp executes shuffles with a mask of its own 16 lanes: three in the upper half, one in the
// lower
__global__ void half_warps(int* out) {
  const unsigned mask = lane() < 16 ? 0xffff : 0xffff0000;
  int x = lane();
  for (int i = 0; i < (lane() < 16 ? 1 : 3); ++i) x = __shfl_xor_sync(mask, x, 1);
  out[threadIdx.x] = x;
}
__global__ void votes(int* out) {
  const int l = lane();
  const unsigned odd = __ballot_sync(kAllLanes, l % 2);
  const int any = __any_sync(kAllLanes, l == 5), all = __all_sync(kAllLanes, l < 31);
  const unsigned match = __match_any_sync(kAllLanes, l / 8);
  const unsigned largest = __reduce_max_sync(kAllLanes, static_cast<unsigned>(l * 7 % 32));
  const int up = __shfl_up_sync(kAllLanes, l, 1), down = __shfl_down_sync(kAllLanes, l, 1, 8);
  const int count = __syncthreads_count(l < 3), none = __syncthreads_or(l > 40);
  const bool good = odd == 0xaaaaaaaa && any && !all && match == 0xffu << (l / 8 * 8) && largest == 31 &&
                    up == (l == 0 ? 0 : l - 1) && down == (l % 8 == 7 ? l : l + 1) && count == 6 && !none;
  out[threadIdx.x] = good;
}
__global__ void histogram(const int* in, int* bins) {
  atomicAdd(bins + in[blockIdx.x * blockDim.x + threadIdx.x] % 8, 1);
}
__global__ void vectors(const float* in, __nv_bfloat16* out) {
  const auto x = load<8>(in + threadIdx.x * 8);
  Vector<__nv_bfloat16, 8> y;
  for (int i = 0; i < 8; ++i) y[i] = rounded<__nv_bfloat16>(x[i]);
  store(out + threadIdx.x * 8, y);
}

const char* check(bool good) { return good ? nullptr : "a wrong result"; }

}  // namespace

#define CASE(NAME, ...) {#NAME, []() -> const char* { __VA_ARGS__; }, nullptr}

const std::vector<Case> kRight {
  CASE(reduce, Array<int> in(1000); Array<int> out(1); for (int i = 0; i < 1000; ++i) in[i] = i;
       if (const char* e = launch(reduce, 1, 256, 0, nullptr, in.data(), 1000, out.data())) return e;
       return check(out[0] == 499500)),
      CASE(reverse, Array<int> values(300); for (int i = 0; i < 300; ++i) values[i] = i;
           if (const char* e = launch(reverse, 1, 300, 300 * 4, nullptr, values.data())) return e;
           for (int i = 0; i < 300; ++i) if (values[i] != 299 - i) return check(false); return nullptr),
      CASE(rotate_in_warp, Array<int> out(64);
           if (const char* e = launch(rotate_in_warp, 1, 64, 0, nullptr, out.data())) return e;
           for (int i = 0; i < 64; ++i) if (out[i] != i / 32 * 32 + (i + 1) % 32 + 2) return check(false);
           return nullptr),
      CASE(half_warps, Array<int> out(32);
           if (const char* e = launch(half_warps, 1, 32, 0, nullptr, out.data())) return e;
           for (int i = 0; i < 32; ++i) if (out[i] != (i ^ 1)) return check(false); return nullptr),
      CASE(votes, Array<int> out(64);
           if (const char* e = launch(votes, 1, 64, 0, nullptr, out.data())) return e;
           for (int i = 0; i < 64; ++i) if (!out[i]) return check(false); return nullptr),
      CASE(histogram, Array<int> in(256); Array<int> bins(8); for (int i = 0; i < 256; ++i) in[i] = i;
           if (const char* e = launch(histogram, 4, 64, 0, nullptr, in.data(), bins.data())) return e;
           for (int i = 0; i < 8; ++i) if (bins[i] != 32) return check(false); return nullptr),
      CASE(
          vectors, Array<float> in(256); Array<__nv_bfloat16> out(256);
          for (int i = 0; i < 256; ++i) in[i] = i + 0.5f;
          if (const char* e = launch(vectors, 1, 32, 0, nullptr, in.data(), out.data())) return e;
          for (int i = 0; i < 256; ++i) if (std::abs(to_float(out[i]) - i - 0.5f) > 0.5f) return check(false);
          return nullptr),
};

}  // namespace simt_tests
