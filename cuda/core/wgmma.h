#pragma once

// Hopper's asynchronous matrix products (sm_90a). A warpgroup multiplies matrix a (64, 16) by matrix b (16,
// n), both of 16-bit numbers, and adds the result to registers d while it does other work. The call sequence
// is:
//   wgmma_fence(d); wgmma(d, ...) as often as needed; wgmma_commit(); ... ; wgmma_wait<pending>(d);
// Between the first wgmma and the wait, no code may access the registers d. Nor may it write to the registers
// of a, or to the operands in shared memory. The fragments have the layout of mma_16x8x16 (ptx.h). Warp w of
// the warpgroup has rows 16 w to 16 w + 15, and d[j] has columns 8 j to 8 j + 7.

#include <cstdint>
#include <type_traits>

#include "cuda/core/hopper.h"

namespace shoestring::cuda {

/// Returns the wgmma descriptor of a swizzled tile (rows, 64) in shared memory, as tma_load writes it. The
/// functions below return offsets to add to such a descriptor.
__device__ inline uint64_t wgmma_operand(const void* tile) {
  const uint64_t at = shared_address(tile);
  return (at & 0x3ffff) >> 4 | uint64_t{16 >> 4} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}
/// Returns the wgmma descriptor offset of a tile that starts `bytes` bytes later; `bytes` is a multiple of
/// 1024.
__device__ constexpr uint64_t wgmma_bytes(int bytes) { return static_cast<uint64_t>(bytes >> 4); }
/// Returns the wgmma descriptor offset for products that sum over the rows of a tile, instead of its columns.
/// The next 64 columns of the operand are `panel` bytes further on.
__device__ constexpr uint64_t wgmma_rows_together(int panel) {
  return static_cast<uint64_t>(panel / 16 - 1) << 16;
}
/// Returns the wgmma descriptor offset of the 16 columns of an operand that start at column k; if
/// rows_together, of the 16 rows that start at row k. k is a multiple of 16.
__device__ constexpr uint64_t wgmma_step(int k, bool rows_together = false, int panel = 16) {
  return rows_together ? k * 128 >> 4 : (k / 64 * panel + k % 64 * 2) >> 4;
}

#if defined(__CUDACC__)

/// Prevents the compiler from moving accesses to these registers across this point. Call it for the registers
/// of operand a before wgmma_fence(d), which itself calls it for the result d.
template <int tiles>
__device__ void wgmma_pin(float (&d)[tiles][4]) {
#pragma unroll
  for (int j = 0; j < tiles; ++j) {
    asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
  }
}

template <int count>
__device__ void wgmma_pin(uint32_t (&a)[count][4]) {
#pragma unroll
  for (int j = 0; j < count; ++j) {
    asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3])::"memory");
  }
}

/// Makes the first wgmma product of a group wait for earlier accesses to the registers of the result d and of
/// operand a.
template <int tiles>
__device__ void wgmma_fence(float (&d)[tiles][4]) {
  wgmma_pin(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// Makes a group of all wgmma products that were started since the last group.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most `pending` of the most recent groups of wgmma products are in progress. d must be the
/// result of a group that is then finished.
template <int pending, int tiles>
__device__ void wgmma_wait(float (&d)[tiles][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
  wgmma_pin(d);
}

// The asm operands for the registers of the result d: of one tile of 8 columns, of eight tiles, and of all
// tiles for each n.
#define SHOESTRING_D(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define SHOESTRING_D8(j)                                                                               \
  SHOESTRING_D(j), SHOESTRING_D(j + 1), SHOESTRING_D(j + 2), SHOESTRING_D(j + 3), SHOESTRING_D(j + 4), \
      SHOESTRING_D(j + 5), SHOESTRING_D(j + 6), SHOESTRING_D(j + 7)
#define SHOESTRING_D48() \
  SHOESTRING_D(0), SHOESTRING_D(1), SHOESTRING_D(2), SHOESTRING_D(3), SHOESTRING_D(4), SHOESTRING_D(5)
#define SHOESTRING_D64() SHOESTRING_D8(0)
#define SHOESTRING_D96() \
  SHOESTRING_D8(0), SHOESTRING_D(8), SHOESTRING_D(9), SHOESTRING_D(10), SHOESTRING_D(11)
#define SHOESTRING_D128() SHOESTRING_D8(0), SHOESTRING_D8(8)
#define SHOESTRING_D192() SHOESTRING_D128(), SHOESTRING_D8(16)
#define SHOESTRING_D256() SHOESTRING_D192(), SHOESTRING_D8(24)
#define SHOESTRING_A_SHARED() "l"(a)
#define SHOESTRING_A_REGISTERS() "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define SHOESTRING_R48                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23"
#define SHOESTRING_R64 \
  SHOESTRING_R48       \
  ","                  \
  "%24,%25,%26,%27,%28,%29,%30,%31"
#define SHOESTRING_R96 \
  SHOESTRING_R64       \
  ","                  \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define SHOESTRING_R128 \
  SHOESTRING_R96        \
  ","                   \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SHOESTRING_R192                                              \
  SHOESTRING_R128                                                    \
  ","                                                                \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SHOESTRING_R256                                                          \
  SHOESTRING_R192                                                                \
  ","                                                                            \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// Arguments of the macro: OPERANDS holds the asm operand numbers of a and b, in braces if a is in registers.
// ADD and KN are the operand numbers of `add` and b_is_kn. TRANS_A is given only for an operand a in shared
// memory.
#define SHOESTRING_WGMMA_OF(TYPE, N, REGISTERS, D, OPERANDS, ADD, TRANS_A, KN, A)                           \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD                                                  \
               ", 0;\n"                                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " OPERANDS \
               ", add, 1, 1" TRANS_A ", " KN ";\n}"                                                         \
               : D()                                                                                        \
               : A(), "l"(b), "r"(static_cast<int>(add)), "n"(int{b_is_kn}))
#define SHOESTRING_WGMMA(...)                                                             \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                       \
    SHOESTRING_WGMMA_OF("bf16", __VA_ARGS__);                                             \
  } else {                                                                                \
    static_assert(std::is_same_v<T, __half>, "wgmma multiplies __nv_bfloat16 or __half"); \
    SHOESTRING_WGMMA_OF("f16", __VA_ARGS__);                                              \
  }

/// Starts d (64, n) = a b, or d += a b if `add`. a and b are wgmma descriptors. n is 8 * tiles: 48, 64, 96,
/// 128, 192 or 256. If b_is_kn, the product sums over the rows of b's tile, otherwise over its columns. With
/// b_is_kn and n = 96, b has one and a half panels of 64 columns. The text of PTX does not cover that, and
/// CUTLASS has no such product; on an H200 it is exact (tests/simt/test_hopper.cpp).
template <class T, bool b_is_kn, int tiles>
__device__ void wgmma(float (&d)[tiles][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (tiles == 6) {
    SHOESTRING_WGMMA("48", SHOESTRING_R48, SHOESTRING_D48, "%24, %25", "%26", ", 0", "%27",
                     SHOESTRING_A_SHARED)
  } else if constexpr (tiles == 8) {
    SHOESTRING_WGMMA("64", SHOESTRING_R64, SHOESTRING_D64, "%32, %33", "%34", ", 0", "%35",
                     SHOESTRING_A_SHARED)
  } else if constexpr (tiles == 12) {
    SHOESTRING_WGMMA("96", SHOESTRING_R96, SHOESTRING_D96, "%48, %49", "%50", ", 0", "%51",
                     SHOESTRING_A_SHARED)
  } else if constexpr (tiles == 16) {
    SHOESTRING_WGMMA("128", SHOESTRING_R128, SHOESTRING_D128, "%64, %65", "%66", ", 0", "%67",
                     SHOESTRING_A_SHARED)
  } else if constexpr (tiles == 24) {
    SHOESTRING_WGMMA("192", SHOESTRING_R192, SHOESTRING_D192, "%96, %97", "%98", ", 0", "%99",
                     SHOESTRING_A_SHARED)
  } else {
    static_assert(tiles == 32, "wgmma: n is 48, 64, 96, 128, 192 or 256");
    SHOESTRING_WGMMA("256", SHOESTRING_R256, SHOESTRING_D256, "%128, %129", "%130", ", 0", "%131",
                     SHOESTRING_A_SHARED)
  }
}
/// Starts d = a b, or d += a b if `add`, with operand a in registers and b given by its wgmma descriptor.
template <class T, bool b_is_kn, int tiles>
__device__ void wgmma(float (&d)[tiles][4], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (tiles == 6) {
    SHOESTRING_WGMMA("48", SHOESTRING_R48, SHOESTRING_D48, "{%24, %25, %26, %27}, %28", "%29", "", "%30",
                     SHOESTRING_A_REGISTERS)
  } else if constexpr (tiles == 8) {
    SHOESTRING_WGMMA("64", SHOESTRING_R64, SHOESTRING_D64, "{%32, %33, %34, %35}, %36", "%37", "", "%38",
                     SHOESTRING_A_REGISTERS)
  } else if constexpr (tiles == 12) {
    SHOESTRING_WGMMA("96", SHOESTRING_R96, SHOESTRING_D96, "{%48, %49, %50, %51}, %52", "%53", "", "%54",
                     SHOESTRING_A_REGISTERS)
  } else if constexpr (tiles == 16) {
    SHOESTRING_WGMMA("128", SHOESTRING_R128, SHOESTRING_D128, "{%64, %65, %66, %67}, %68", "%69", "", "%70",
                     SHOESTRING_A_REGISTERS)
  } else if constexpr (tiles == 24) {
    SHOESTRING_WGMMA("192", SHOESTRING_R192, SHOESTRING_D192, "{%96, %97, %98, %99}, %100", "%101", "",
                     "%102", SHOESTRING_A_REGISTERS)
  } else {
    static_assert(tiles == 32, "wgmma: n is 48, 64, 96, 128, 192 or 256");
    SHOESTRING_WGMMA("256", SHOESTRING_R256, SHOESTRING_D256, "{%128, %129, %130, %131}, %132", "%133", "",
                     "%134", SHOESTRING_A_REGISTERS)
  }
}

#undef SHOESTRING_WGMMA
#undef SHOESTRING_WGMMA_OF
#undef SHOESTRING_R256
#undef SHOESTRING_R192
#undef SHOESTRING_R128
#undef SHOESTRING_R96
#undef SHOESTRING_R64
#undef SHOESTRING_R48
#undef SHOESTRING_A_REGISTERS
#undef SHOESTRING_A_SHARED
#undef SHOESTRING_D256
#undef SHOESTRING_D192
#undef SHOESTRING_D128
#undef SHOESTRING_D96
#undef SHOESTRING_D64
#undef SHOESTRING_D48
#undef SHOESTRING_D8
#undef SHOESTRING_D

#endif

}  // namespace shoestring::cuda
