// A matrix product with the structure of real kernels: cp.async fills one buffer while ldmatrix and mma read
// the other buffer. Sizes in bytes are equal for bf16, fp16 and TF32. A row has 64 bytes of k in a stage, of
// which an mma takes 32; a row of an ldmatrix matrix has 16.

#include "cuda/core/launch.h"
#include "cuda/core/ptx.h"
#include "cuda/core/warp.h"
#include "primitives.h"

namespace simt_tests {
namespace {

using namespace shoestring::cuda;

// kTile: rows and columns of c that a block computes; each of its warps computes 16 rows
constexpr int kTile = 64, kThreads = 128;
constexpr int kStep = 64;  // bytes of k that one stage holds
// bytes from one row of a stage to the next; puts 8 rows of an ldmatrix into different banks
constexpr int kPitch = kStep + 16;
constexpr int kPitchKn = kTile * 2 + 16;

struct Stage {
  // If b is stored as (k, n), its tile in shared memory has 32 rows of kPitchKn bytes.
  alignas(16) unsigned char a[kTile * kPitch], b[kTile * kPitch];
};

// Starts copies of `rows` rows of `row_bytes` bytes, from a matrix whose rows have `ld` bytes. Bytes outside
// the matrix become zero.
template <int row_bytes, int pitch>
__device__ void fill(unsigned char* to, const unsigned char* from, int rows, int first_row, int all_rows,
                     int first_byte, int ld) {
  for (int i = threadIdx.x; i < rows * row_bytes / 16; i += kThreads) {
    const int row = i / (row_bytes / 16), byte = i % (row_bytes / 16) * 16;
    const bool inside = first_row + row < all_rows && first_byte + byte < ld;
    const unsigned char* source = from + (inside ? int64_t{first_row + row} * ld + first_byte + byte : 0);
    cp_async<16>(to + row * pitch + byte, source, inside ? 16 : 0);
  }
}

template <class T>
__device__ void multiply(float (&c)[4], uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (sizeof(T) == 4) {
    uint32_t rounded_a[4];
    for (int i = 0; i < 4; ++i) rounded_a[i] = to_tf32(__uint_as_float(a[i]));
    mma_16x8x8_tf32(c, rounded_a, {to_tf32(__uint_as_float(b[0])), to_tf32(__uint_as_float(b[1]))});
  } else {
    mma_16x8x16<T>(c, a, b);
  }
}

template <class T, bool b_is_kn, Flaw flaw>
__global__ void __launch_bounds__(kThreads) product(Gemm p) {
  __shared__ Stage stages[2];
  const int tiles_n = (p.n + kTile - 1) / kTile;
  const int row = static_cast<int>(blockIdx.x) / tiles_n * kTile,
            column = static_cast<int>(blockIdx.x) % tiles_n * kTile;
  const auto* a = static_cast<const unsigned char*>(p.a);
  const auto* b = static_cast<const unsigned char*>(p.b);
  const int row_bytes = p.k * static_cast<int>(sizeof(T)), steps = (row_bytes + kStep - 1) / kStep;
  const auto load = [&](int step) {
    Stage& to = stages[step % 2];
    fill<kStep, kPitch>(to.a, a, kTile, row, p.m, step * kStep, row_bytes);
    if (b_is_kn) {
      fill<kTile * 2, kPitchKn>(to.b, b, kStep / 2, step * kStep / 2, p.k, column * 2, p.n * 2);
    } else {
      fill<kStep, kPitch>(to.b, b, kTile, column, p.n, step * kStep, row_bytes);
    }
  };
  float c[kTile / 8][4] = {};
  load(0);
  cp_async_commit();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load(step + 1);
    // after the last load this is an empty group, so that cp_async_wait can always count one group
    cp_async_commit();
    if (flaw != Flaw::no_wait) cp_async_wait<flaw == Flaw::wait_off_by_one ? 2 : 1>();
    if (flaw != Flaw::no_barrier_after_wait) __syncthreads();
    const Stage& stage = stages[step % 2];
    const int l = lane();
#pragma unroll
    for (int byte = 0; byte < kStep; byte += 32) {
      uint32_t a_fragment[4];
      ldmatrix(a_fragment, stage.a + (warp() * 16 + l % 16) * kPitch + byte + l / 16 * 16 +
                               (flaw == Flaw::misaligned_row ? 8 : 0));
#pragma unroll
      for (int j = 0; j < kTile / 8; j += 2) {  // an iteration loads and uses two fragments of b
        uint32_t b_fragments[4];
        if constexpr (b_is_kn) {
          ldmatrix_trans(b_fragments, stage.b + (byte / 2 + l % 16) * kPitchKn + (j * 8 + l / 16 * 8) * 2);
        } else {
          ldmatrix(b_fragments, stage.b + (j * 8 + l / 16 * 8 + l % 8) * kPitch + byte + l / 8 % 2 * 16);
        }
        multiply<T>(c[j], a_fragment, {b_fragments[0], b_fragments[1]});
        multiply<T>(c[j + 1], a_fragment, {b_fragments[2], b_fragments[3]});
      }
    }
    if (flaw != Flaw::no_barrier_before_copy)
      __syncthreads();  // waits until all warps have read this stage, which the next copies overwrite
  }
  for (int j = 0; j < kTile / 8; ++j) {
    for (int i = 0; i < 4; ++i) {
      const int r = row + warp() * 16 + lane() / 4 + i / 2 * 8, col = column + j * 8 + lane() % 4 * 2 + i % 2;
      if (r < p.m && col < p.n) p.c[int64_t{r} * p.n + col] = c[j][i];
    }
  }
}

template <class T, bool b_is_kn, Flaw flaw>
const char* run(const Gemm& p) {
  const int64_t tiles = int64_t{(p.m + kTile - 1) / kTile} * ((p.n + kTile - 1) / kTile);
  return launch(product<T, b_is_kn, flaw>, tiles, kThreads, 0, nullptr, p);
}

}  // namespace

const char* gemm(const Gemm& p, Flaw flaw) {
  if (flaw == Flaw::none) {
    if (p.type == Type::tf32) return run<float, false, Flaw::none>(p);
    if (p.type == Type::fp16)
      return p.b_is_kn ? run<__half, true, Flaw::none>(p) : run<__half, false, Flaw::none>(p);
    return p.b_is_kn ? run<__nv_bfloat16, true, Flaw::none>(p) : run<__nv_bfloat16, false, Flaw::none>(p);
  }
#if !defined(__CUDACC__)
  switch (flaw) {
    case Flaw::no_wait:
      return run<__half, false, Flaw::no_wait>(p);
    case Flaw::wait_off_by_one:
      return run<__half, false, Flaw::wait_off_by_one>(p);
    case Flaw::no_barrier_after_wait:
      return run<__half, false, Flaw::no_barrier_after_wait>(p);
    case Flaw::no_barrier_before_copy:
      return run<__half, false, Flaw::no_barrier_before_copy>(p);
    case Flaw::misaligned_row:
      return run<__half, false, Flaw::misaligned_row>(p);
    default:
      break;
  }
#endif
  return "no such kernel";
}

}  // namespace simt_tests
