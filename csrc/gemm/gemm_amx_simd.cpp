// Products of bf16 matrices with AMX, Intel's unit for matrix products, one tile of 32 x 32 results at a
// time.

#include "gemm/gemm_table.h"

#include "gemm/amx_simd.h"
#include "gemm/results_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
extern const kernels::GemmProduct gemm_amx;

#if defined(__AVX512F__)
#pragma GCC push_options
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")

namespace {

static_assert(kPanel == kColumns);
// Maximum depth of a packed panel. A panel takes 16 KiB, so that a panel of the outer loop and the panels of
// the inner loop that pass it fit the L1 cache together.
constexpr int64_t kDepthAmx = 256;

constexpr int64_t panel_size(int64_t depth) {
  return kernels::packed_size((depth + kAmxDepth - 1) / kAmxDepth * kAmxDepth, 2, kPanel);
}

template <class Element, bool kLinesOutside>
void pack_panels(const typename Element::Type* source, int64_t lines, int64_t depth, int64_t line_stride,
                 int64_t depth_stride, int64_t, float* out) {
  pack_tiles<Element, kLinesOutside, kPanel>(source, lines, depth, line_stride, depth_stride,
                                             panel_size(depth), out);
}

// The part of a panel that a later tile reads. It is prefetched into the L2 cache while a tile is multiplied.
struct Upcoming {
  const char* data;
  int64_t cache_lines;
};

// Multiplies a panel of a by a panel of b. `size` is the depth in pairs.
SHOESTRING_INLINE void add_panels(const float* a, const float* b, int64_t size, const Upcoming& next) {
  const char* from = next.data;
  const int64_t steps = size / kAmxLines, some = (next.cache_lines + steps - 1) / steps;
  int64_t left = next.cache_lines;
  for (int64_t p = 0; p < size; p += kAmxLines, a += 2 * kSquareSize, b += 2 * kSquareSize) {
    for (int64_t k = left < some ? left : some; k > 0; --k, --left, from += 64)
      __builtin_prefetch(from, 0, 2);
    add_products(a, a + kSquareSize, 2 * kSquareSize, b, kAmxLines);
  }
}

// Computes one tile of 32 x 32 results, of which m x n exist.
SHOESTRING_INLINE void tile_amx(const float* a, const float* b, int64_t m, int64_t n, int64_t size, float* c,
                                int64_t stride, float alpha, float beta, const kernels::GemmNarrow* narrow,
                                int64_t i, int64_t j, const Upcoming& next) {
  if (narrow == nullptr) {
    for (int64_t row = 0; row < m; ++row) {
      __builtin_prefetch(c + row * stride, 1);
      __builtin_prefetch(c + row * stride + kPanel - 1, 1);
    }
    if (m == kPanel && n == kPanel && alpha == 1 && (beta == 0 || beta == 1)) {
      beta == 0 ? zero_sums() : load_sums(c, stride);
      add_panels(a, b, size, next);
      return store_sums(c, stride);
    }
  }
  // Sums that continue those in c start from them in each tile, so all tiles round alike.
  alignas(64) float sum[kPanel][kColumns];
  const bool more = alpha == 1 && beta == 1;
  if (more) {
    for (int64_t row = 0; row < kPanel; ++row) {
      for (int64_t k = 0; k < kPanel; k += kLanes) {
        store(sum[row] + k, row < m ? load_some<Float>(c + row * stride + k, n - k) : F32{});
      }
    }
    load_sums(sum[0], kColumns);
  } else {
    zero_sums();
  }
  add_panels(a, b, size, next);
  store_sums(sum[0], kColumns);
  finish_tile(sum[0], c, stride, m, n, alpha, more ? 0 : beta, narrow, i, j);
}

void multiply_amx(const float* a, const float* b, int64_t m, int64_t n, int64_t depth, float* c,
                  int64_t stride, float alpha, float beta, const kernels::GemmNarrow* narrow,
                  bool b_outside) {
  const int64_t padded = (depth + kAmxDepth - 1) / kAmxDepth * kAmxDepth, panel = panel_size(depth);
  // Each tile prefetches its share of the next panel of the outer loop.
  const int64_t inner = ((b_outside ? m : n) + kPanel - 1) / kPanel,
                share = (panel / kAmxLines + inner - 1) / inner;
  const auto at = [&](int64_t i, int64_t j) {
    const float* outer = (b_outside ? b + j / kPanel * panel : a + i / kPanel * panel) + panel;
    const Upcoming next{
        reinterpret_cast<const char*>(outer + (b_outside ? i : j) / kPanel * share * kAmxLines), share};
    tile_amx(a + i / kPanel * panel, b + j / kPanel * panel, m - i < kPanel ? m - i : kPanel,
             n - j < kPanel ? n - j : kPanel, padded / 2, c + i * stride + j, stride, alpha, beta, narrow, i,
             j, next);
  };
  start_tiles();
  if (b_outside) {
    for (int64_t j = 0; j < n; j += kPanel) {
      for (int64_t i = 0; i < m; i += kPanel) at(i, j);
    }
  } else {
    for (int64_t i = 0; i < m; i += kPanel) {
      for (int64_t j = 0; j < n; j += kPanel) at(i, j);
    }
  }
  stop_tiles();
}

}  // namespace
#pragma GCC pop_options

const kernels::GemmProduct gemm_amx{
    pack_panels<Float, false>,
    pack_panels<BFloat16, false>,
    pack_panels<Half, false>,
    multiply_amx,
    nullptr,
    2,
    {pack_panels<Float, true>, pack_panels<BFloat16, true>, pack_panels<Half, true>},
    kPanel,
    kPanel,
    kAmxDepth,
    kDepthAmx,
    true};
#else
const kernels::GemmProduct gemm_amx{};
#endif

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
