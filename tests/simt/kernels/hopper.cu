// A matrix product with the structure of kernels for Hopper: one thread copies tiles into a ring of two
// stages, and a warpgroup multiplies them.

#include "hopper.h"

#include "cuda/core/launch.h"
#include "cuda/core/tensor_map.h"
#include "cuda/core/warp.h"
#include "cuda/core/wgmma.h"

namespace simt_tests {
namespace {

using namespace shoestring::cuda;

// kStages: stages of the ring. kStep: elements of k per stage. kTileA: bytes of a tile of 64 rows.
constexpr int kStages = 2, kStep = 64, kTileA = 64 * 128;

struct Maps {
  TensorMap a, b;
};

__device__ unsigned char* aligned_shared() {
  unsigned char* p = dynamic_shared();
  return p + (1024 - reinterpret_cast<uintptr_t>(p) % 1024) % 1024;
}

// Returns the address of element (row, k) of a swizzled tile.
__device__ const unsigned short* element(const unsigned char* tile, int row, int k) {
  return reinterpret_cast<const unsigned short*>(tile + row * 128 + ((k / 8 ^ row % 8) * 16 + k % 8 * 2));
}

__device__ void fragment(uint32_t (&a)[4], const unsigned char* tile, int k) {
  for (int i = 0; i < 4; ++i) {
    const int row = warp() % 4 * 16 + lane() / 4 + i % 2 * 8, column = k + lane() % 4 * 2 + i / 2 * 8;
    a[i] = *reinterpret_cast<const uint32_t*>(element(tile, row, column));
  }
}

template <int rank>
__device__ void copy(unsigned char* to, const TensorMap& map, Mbarrier& full, int column, int row) {
  int at[rank] = {column, row};
  tma_load(to, map, full, at);
}

template <class T, int rank, int columns, bool b_is_kn, bool a_in_registers, HopperFlaw flaw>
__global__ void __launch_bounds__(384, 1) multiply_tiles(const __grid_constant__ Maps maps, TileGemm p) {
  constexpr int panels = (columns + 63) / 64, b_bytes = panels * 64 * 128;
  __shared__ Mbarrier full[kStages], empty[kStages];
  unsigned char *a = aligned_shared() + (flaw == HopperFlaw::unaligned_tile ? 128 : 0),
                *b = a + kStages * kTileA;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(full[i], 1);
      mbarrier_init(empty[i], 4);
    }
    if (flaw != HopperFlaw::no_init_fence) mbarrier_init_fence();
  }
  if (flaw != HopperFlaw::no_barrier_after_init) __syncthreads();
  const int tiles_n = (p.n + columns - 1) / columns, steps = (p.k + kStep - 1) / kStep;
  const int row = static_cast<int>(blockIdx.x) / tiles_n * 64,
            column = static_cast<int>(blockIdx.x) % tiles_n * columns;
  // Thread 128 issues the tensor copies. All other threads from warp 4 on have nothing to do.
  if (warp() >= 4) {
    if (flaw != HopperFlaw::too_many_registers) registers_shrink<40>();
    if (threadIdx.x != 128) return;
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kStages, parity = step / kStages & 1;
      if (flaw != HopperFlaw::no_empty_wait) mbarrier_wait(empty[stage], parity ^ 1);
      const int bytes = kTileA + (b_is_kn ? b_bytes : columns * 128) +
                        (flaw == HopperFlaw::too_many_bytes) * 16 - (flaw == HopperFlaw::too_few_bytes) * 16;
      if (flaw != HopperFlaw::bytes_after_copy) mbarrier_arrive_expect(full[stage], bytes);
      copy<rank - (flaw == HopperFlaw::one_coordinate_less)>(a + stage * kTileA, maps.a, full[stage],
                                                             step * kStep, row);
      for (int i = 0; i < (b_is_kn ? panels : 1); ++i) {
        unsigned char* to = b + stage * b_bytes + i * 64 * 128;
        copy<rank>(to, maps.b, full[stage], b_is_kn ? column + i * 64 : step * kStep,
                   b_is_kn ? step * kStep : column);
      }
      if (flaw == HopperFlaw::bytes_after_copy) mbarrier_arrive_expect(full[stage], bytes);
    }
    return;
  }
  registers_grow<240>();
  if (flaw == HopperFlaw::half_a_warpgroup && warp() >= 2) return;
  float c[columns / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages, parity = step / kStages & 1;
    if (flaw != HopperFlaw::no_full_wait)
      mbarrier_wait(full[stage], flaw == HopperFlaw::wrong_parity ? parity ^ 1 : parity);
    const uint64_t a_at = wgmma_operand(a + stage * kTileA);
    const uint64_t b_at =
        wgmma_operand(b) + wgmma_bytes(stage * b_bytes) + (b_is_kn ? wgmma_rows_together(64 * 128) : 0);
    uint32_t own[4][4];
    for (int i = 0; i < 4 && a_in_registers; ++i) fragment(own[i], a + stage * kTileA, i * 16);
    if (a_in_registers) wgmma_pin(own);
    if (flaw != HopperFlaw::no_wgmma_fence) wgmma_fence(c);
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      const uint64_t from = b_at + wgmma_step(k, b_is_kn);
      if constexpr (a_in_registers) {
        wgmma<T, b_is_kn>(c, own[k / 16], from, step > 0 || k > 0);
      } else {
        const int other = flaw == HopperFlaw::two_operands && warp() == 1 ? 16 : 0;
        wgmma<T, b_is_kn>(c, a_at + wgmma_step((k + other) % kStep), from, step > 0 || k > 0);
      }
    }
    if (flaw != HopperFlaw::no_commit) wgmma_commit();
    if (flaw == HopperFlaw::touched_accumulators) c[0][0] *= 2;
    if (flaw == HopperFlaw::released_before_wait && lane() == 0) mbarrier_arrive(empty[stage]);
    if (flaw == HopperFlaw::no_wait_at_all) return;
    wgmma_wait<0>(c);
    // waits until all lanes have read their fragments of a from shared memory
    if (a_in_registers) __syncwarp();
    if (flaw != HopperFlaw::released_before_wait && lane() == 0) mbarrier_arrive(empty[stage]);
  }
  for (int j = 0; j < columns / 8; ++j) {
    for (int i = 0; i < 4; ++i) {
      const int r = row + warp() * 16 + lane() / 4 + i / 2 * 8, at = column + j * 8 + lane() % 4 * 2 + i % 2;
      if (r < p.m && at < p.n) p.c[int64_t{r} * p.n + at] = c[j][i];
    }
  }
}

template <HopperFlaw flaw>
__global__ void __launch_bounds__(128)
    multiply_written(const unsigned short* a, const unsigned short* b, float* c) {
  unsigned char *a_tile = aligned_shared(), *b_tile = a_tile + kTileA;
  for (int i = threadIdx.x; i < 64 * 64; i += 128) {
    *const_cast<unsigned short*>(element(a_tile, i / 64, i % 64)) = a[i];
    *const_cast<unsigned short*>(element(b_tile, i / 64, i % 64)) = b[i];
  }
  if (flaw != HopperFlaw::no_async_fence) async_fence();
  if (flaw != HopperFlaw::no_barrier_after_write) __syncthreads();
  float sums[8][4] = {};
  uint32_t own[4][4];
  for (int i = 0; i < 4; ++i) fragment(own[i], a_tile, i * 16);
  wgmma_pin(own);
  wgmma_fence(sums);
#pragma unroll
  for (int k = 0; k < 64; k += 16)
    wgmma<__half, false>(sums, own[k / 16], wgmma_operand(b_tile) + wgmma_step(k), true);
  wgmma_commit();
  if (flaw == HopperFlaw::written_under_way && threadIdx.x == 0)
    *reinterpret_cast<unsigned short*>(b_tile) = 7;
  if (flaw == HopperFlaw::a_under_way) own[3][0] = 7;
  wgmma_wait<0>(sums);
  for (int j = 0; j < 8; ++j) {
    for (int i = 0; i < 4; ++i)
      c[(warp() * 16 + lane() / 4 + i / 2 * 8) * 64 + j * 8 + lane() % 4 * 2 + i % 2] = sums[j][i];
  }
}

template <HopperFlaw flaw>
__global__ void copy_box(const __grid_constant__ TensorMap map, int column, int row, int slice,
                         unsigned short* out) {
  __shared__ Mbarrier full;
  unsigned char* tile = aligned_shared();
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(full, 2 * 4 * 128);
    tma_load<3>(tile, map, full, {column, row, slice});
  }
  if (flaw != HopperFlaw::waits_for_own_warp) __syncwarp();
  mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < 2 * 4 * 64; i += 64) out[i] = *element(tile, i / 64, i % 64);
}

// Encodes the tensor map of a matrix (outer, inner) with `rank` dimensions. The dimensions above two have
// size 1.
const char* encode(TensorMap* map, const void* matrix, int rank, int inner, int outer, int rows) {
  const int64_t row = inner * 2, all = row * outer;
  const int64_t sizes[5] = {inner, outer, 1, 1, 1}, strides[4] = {row, all, all, all};
  const int extent[5] = {64, rows, 1, 1, 1};
  return encode_tensor_map(map, matrix, rank, sizes, strides, extent);
}

template <class T, int rank, int columns, bool b_is_kn, bool a_in_registers,
          HopperFlaw flaw = HopperFlaw::none>
const char* run(const TileGemm& p) {
  Maps maps;
  const char* error = encode(&maps.a, p.a, rank, p.k, p.m, 64);
  if (error == nullptr)
    error = encode(&maps.b, p.b, rank, b_is_kn ? p.n : p.k, b_is_kn ? p.k : p.n, b_is_kn ? 64 : columns);
  if (error != nullptr) return error;
  const int64_t blocks = int64_t{(p.m + 63) / 64} * ((p.n + columns - 1) / columns);
  return launch(multiply_tiles<T, rank, columns, b_is_kn, a_in_registers, flaw>, blocks, 384,
                2048 + kStages * (kTileA + (columns + 63) / 64 * 64 * 128), nullptr, maps, p);
}

template <class T, int rank, int columns>
const char* choose(const TileGemm& p) {
  if (p.b_is_kn)
    return p.a_in_registers ? run<T, rank, columns, true, true>(p) : run<T, rank, columns, true, false>(p);
  return p.a_in_registers ? run<T, rank, columns, false, true>(p) : run<T, rank, columns, false, false>(p);
}

}  // namespace

const char* tile_gemm(const TileGemm& p, HopperFlaw flaw) {
#if !defined(__CUDACC__)
#define SIMT_FLAW(name) \
  if (flaw == HopperFlaw::name) return run<__half, 3, 64, false, false, HopperFlaw::name>(p)
  SIMT_FLAW(no_full_wait);
  SIMT_FLAW(no_empty_wait);
  SIMT_FLAW(released_before_wait);
  SIMT_FLAW(too_many_bytes);
  SIMT_FLAW(too_few_bytes);
  SIMT_FLAW(bytes_after_copy);
  SIMT_FLAW(wrong_parity);
  SIMT_FLAW(no_init_fence);
  SIMT_FLAW(no_barrier_after_init);
  SIMT_FLAW(no_wgmma_fence);
  SIMT_FLAW(no_commit);
  SIMT_FLAW(touched_accumulators);
  SIMT_FLAW(half_a_warpgroup);
  SIMT_FLAW(two_operands);
  SIMT_FLAW(unaligned_tile);
  SIMT_FLAW(too_many_registers);
  SIMT_FLAW(no_wait_at_all);
  if (flaw == HopperFlaw::one_coordinate_less)
    return run<__half, 4, 64, false, false, HopperFlaw::one_coordinate_less>(p);
#undef SIMT_FLAW
#endif
  if (flaw != HopperFlaw::none) return "no such kernel";
  if (p.type == Type::bf16) {
    return p.columns == 256 ? choose<__nv_bfloat16, 5, 256>(p) : choose<__nv_bfloat16, 4, 192>(p);
  }
  return p.columns == 128  ? choose<__half, 4, 128>(p)
         : p.columns == 96 ? choose<__half, 4, 96>(p)
         : p.columns == 48 ? choose<__half, 4, 48>(p)
                           : choose<__half, 3, 64>(p);
}

const char* written_gemm(const void* a, const void* b, float* c, HopperFlaw flaw) {
  auto kernel = multiply_written<HopperFlaw::none>;
#if !defined(__CUDACC__)
  if (flaw == HopperFlaw::no_async_fence) kernel = multiply_written<HopperFlaw::no_async_fence>;
  if (flaw == HopperFlaw::no_barrier_after_write)
    kernel = multiply_written<HopperFlaw::no_barrier_after_write>;
  if (flaw == HopperFlaw::written_under_way) kernel = multiply_written<HopperFlaw::written_under_way>;
  if (flaw == HopperFlaw::a_under_way) kernel = multiply_written<HopperFlaw::a_under_way>;
#endif
  return launch(kernel, 1, 128, 1024 + 2 * kTileA, nullptr, static_cast<const unsigned short*>(a),
                static_cast<const unsigned short*>(b), c);
}

const char* box(const void* in, int column, int row, int slice, unsigned short* out, HopperFlaw flaw) {
  const int64_t sizes[3] = {72, 5, 3}, strides[2] = {144, 5 * 144};
  const int extent[3] = {64, 4, 2};
  TensorMap map;
  if (const char* error = encode_tensor_map(&map, in, 3, sizes, strides, extent)) return error;
  auto kernel = copy_box<HopperFlaw::none>;
#if !defined(__CUDACC__)
  if (flaw == HopperFlaw::waits_for_own_warp) kernel = copy_box<HopperFlaw::waits_for_own_warp>;
#endif
  return launch(kernel, 1, 64, 2048, nullptr, map, column, row, slice, out);
}

const char* map_error(const void* address, int rank, const int64_t* sizes, const int64_t* strides,
                      const int* extent) {
  TensorMap map;
  return encode_tensor_map(&map, address, rank, sizes, strides, extent);
}

}  // namespace simt_tests
