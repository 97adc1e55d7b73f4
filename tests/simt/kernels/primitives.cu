// Kernels that test each function of cuda/core/ptx.h by itself, exactly as the header describes it.

#include "cuda/core/launch.h"
#include "cuda/core/ptx.h"
#include "cuda/core/warp.h"
#include "primitives.h"

namespace simt_tests {
namespace {

using namespace shoestring::cuda;

template <int bytes, Flaw flaw>
__global__ void copies(const unsigned char* in, const int* from_bytes, unsigned char* out) {
  alignas(16) __shared__ unsigned char shared[128 * 16];
  const int i = threadIdx.x;
  unsigned char* to = (flaw == Flaw::to_global_memory ? out : shared) + i * 16;
  cp_async<bytes>(to, in + i * 16, from_bytes[i] + (flaw == Flaw::too_many_bytes ? 1 : 0));
  cp_async_commit();
  if (flaw == Flaw::no_wait_at_all) return;
  cp_async_wait<0>();
  for (int byte = 0; byte < bytes; ++byte) out[i * 16 + byte] = shared[i * 16 + byte];
}

template <int count, bool trans, Flaw flaw>
__global__ void load_matrices(const unsigned short* in, unsigned* out) {
  alignas(16) __shared__ unsigned short shared[4 * 64];
  // Each lane stores one row of a matrix and reads values of other rows. Lanes from 8 * count on have no row
  // of the loaded matrices and pass a null pointer.
  for (int i = 0; i < 8; ++i) shared[lane() * 8 + i] = in[lane() * 8 + i];
  if (flaw != Flaw::no_syncwarp) __syncwarp();
  const unsigned short* row =
      lane() < 8 * count ? (flaw == Flaw::row_in_global_memory ? in : shared) + lane() * 8 : nullptr;
  uint32_t loaded[count];
  if (trans) {
    ldmatrix_trans(loaded, row);
  } else {
    ldmatrix(loaded, row);
  }
  for (int i = 0; i < count; ++i) out[lane() * count + i] = loaded[i];
}

// Packs two 16-bit elements into one register; the second is `apart` elements after the first.
__device__ uint32_t pair(const unsigned short* at, int apart) { return at[0] | uint32_t{at[apart]} << 16; }

template <class T, Flaw flaw>
// Computes c (16, 8) = a (16, 16) b (16, 8) with one mma.
__global__ void multiply(const unsigned short* a, const unsigned short* b, float* c) {
  const int g = lane() / 4, t = lane() % 4;
  uint32_t fa[4], fb[2];
  for (int i = 0; i < 4; ++i) fa[i] = pair(a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8, 1);
  for (int i = 0; i < 2; ++i) fb[i] = pair(b + (2 * t + i * 8) * 8 + g, 8);
  float fc[4] = {};
  if (flaw == Flaw::two_places && lane() == 3) {
    mma_16x8x16<T>(fc, fa, fb);
  } else if (flaw != Flaw::missing_lane || lane() != 3) {
    mma_16x8x16<T>(fc, fa, fb);
  }
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = fc[i];
}

// Computes c (16, 8) = a (16, 8) b (8, 8) with one TF32 mma.
__global__ void multiply_tf32(const float* a, const float* b, float* c) {
  const int g = lane() / 4, t = lane() % 4;
  uint32_t fa[4], fb[2];
  for (int i = 0; i < 4; ++i) fa[i] = __float_as_uint(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
  for (int i = 0; i < 2; ++i) fb[i] = __float_as_uint(b[(t + i * 4) * 8 + g]);
  float fc[4] = {};
  mma_16x8x8_tf32(fc, fa, fb);
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = fc[i];
}

__global__ void round_bits(const unsigned* in, unsigned* out) {
  out[threadIdx.x] = to_tf32(__uint_as_float(in[threadIdx.x]));
}

// Ids of named barriers. Each of the two buffers has a barrier "full" (1 and 2) and a barrier "empty" (3 and
// 4).
constexpr int kFull = 1, kEmpty = 3;

template <Flaw flaw>
__global__ void pass_on(const float* in, int chunks, float* out) {
  __shared__ float buffer[2][64];
  const int i = threadIdx.x % 64;
  const bool fills = threadIdx.x < 64;
  const int all = flaw == Flaw::count_too_small || (flaw == Flaw::unequal_counts && fills) ? 64 : 128;
  if (fills) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (chunk >= 2) barrier_sync(kEmpty + chunk % 2, all);
      if (flaw == Flaw::arrive_too_soon) barrier_arrive(kFull + chunk % 2, all);
      buffer[chunk % 2][i] = in[chunk * 64 + i];
      if (flaw == Flaw::arrive_too_soon || flaw == Flaw::no_arrive ||
          (flaw == Flaw::half_a_warp && lane() < 16))
        continue;
      barrier_arrive(kFull + chunk % 2, all);
      if (flaw == Flaw::arrive_twice) barrier_arrive(kFull + chunk % 2, all);
    }
  } else {
    float sum = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      barrier_sync(kFull + chunk % 2, all);
      sum += buffer[chunk % 2][63 - i];  // reads a value that a lane of another warp wrote
      if (chunk + 2 < chunks) barrier_arrive(kEmpty + chunk % 2, all);
    }
    out[63 - i] = sum;
  }
}

__global__ void pass_along(const float* in, float* out) {
  __shared__ float buffer[kWarp];
  if (warp() == 0) {
    buffer[lane()] = in[lane()];
    barrier_arrive(1, 64);
  } else if (warp() == 1) {
    barrier_sync(1, 64);
    barrier_arrive(2, 64);
  } else {
    barrier_sync(2, 64);
    out[lane()] = buffer[31 - lane()];
  }
}

}  // namespace

const char* copy_async(int bytes, const unsigned char* in, const int* from_bytes, unsigned char* out,
                       Flaw flaw) {
  auto kernel = bytes == 16  ? copies<16, Flaw::none>
                : bytes == 8 ? copies<8, Flaw::none>
                             : copies<4, Flaw::none>;
#if !defined(__CUDACC__)
  if (flaw == Flaw::no_wait_at_all) kernel = copies<16, Flaw::no_wait_at_all>;
  if (flaw == Flaw::too_many_bytes) kernel = copies<16, Flaw::too_many_bytes>;
  if (flaw == Flaw::to_global_memory) kernel = copies<16, Flaw::to_global_memory>;
#endif
  return launch(kernel, 1, 128, 0, nullptr, in, from_bytes, out);
}

template <bool trans>
auto matrices_kernel(int count) {
  return count == 4   ? load_matrices<4, trans, Flaw::none>
         : count == 2 ? load_matrices<2, trans, Flaw::none>
                      : load_matrices<1, trans, Flaw::none>;
}

const char* matrices(int count, bool trans, const unsigned short* in, unsigned* out, Flaw flaw) {
  auto kernel = trans ? matrices_kernel<true>(count) : matrices_kernel<false>(count);
#if !defined(__CUDACC__)
  if (flaw == Flaw::no_syncwarp) kernel = load_matrices<4, false, Flaw::no_syncwarp>;
  if (flaw == Flaw::row_in_global_memory) kernel = load_matrices<4, false, Flaw::row_in_global_memory>;
#endif
  return launch(kernel, 1, kWarp, 0, nullptr, in, out);
}

const char* one_mma(Type type, const void* a, const void* b, float* c, Flaw flaw) {
  if (type == Type::tf32) {
    return launch(multiply_tf32, 1, kWarp, 0, nullptr, static_cast<const float*>(a),
                  static_cast<const float*>(b), c);
  }
  auto kernel = type == Type::fp16 ? multiply<__half, Flaw::none> : multiply<__nv_bfloat16, Flaw::none>;
#if !defined(__CUDACC__)
  if (flaw == Flaw::missing_lane) kernel = multiply<__half, Flaw::missing_lane>;
  if (flaw == Flaw::two_places) kernel = multiply<__half, Flaw::two_places>;
#endif
  return launch(kernel, 1, kWarp, 0, nullptr, static_cast<const unsigned short*>(a),
                static_cast<const unsigned short*>(b), c);
}

const char* round_to_tf32(const unsigned* in, unsigned* out, int n) {
  return launch(round_bits, 1, n, 0, nullptr, in, out);
}

const char* ring(const float* in, int chunks, float* out, Flaw flaw) {
  auto kernel = pass_on<Flaw::none>;
#if !defined(__CUDACC__)
  switch (flaw) {
    case Flaw::count_too_small:
      kernel = pass_on<Flaw::count_too_small>;
      break;
    case Flaw::unequal_counts:
      kernel = pass_on<Flaw::unequal_counts>;
      break;
    case Flaw::half_a_warp:
      kernel = pass_on<Flaw::half_a_warp>;
      break;
    case Flaw::arrive_too_soon:
      kernel = pass_on<Flaw::arrive_too_soon>;
      break;
    case Flaw::arrive_twice:
      kernel = pass_on<Flaw::arrive_twice>;
      break;
    case Flaw::no_arrive:
      kernel = pass_on<Flaw::no_arrive>;
      break;
    default:
      break;
  }
#endif
  return launch(kernel, 1, 128, 0, nullptr, in, chunks, out);
}

const char* relay(const float* in, float* out) { return launch(pass_along, 1, 96, 0, nullptr, in, out); }

}  // namespace simt_tests
