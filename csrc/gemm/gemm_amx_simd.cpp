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

// A tile of the result whose sums are complete, but not yet written to c or `narrow`. AMX is a unit of its
// own, so the vector units write the rows of this tile while AMX multiplies the next one.
struct Unwritten {
  const float* sum;
  float* c;
  int64_t m, n, i, j;  // m: 0 if there is no such tile
};

// How the sums of multiply_amx() become results.
struct Output {
  int64_t stride;
  float alpha, beta;
  const kernels::GemmNarrow* narrow;
  bool plain;  // whether the results are the sums, rounded to bf16

  SHOESTRING_METHOD void write_rows(const Unwritten& t, int64_t first, int64_t last) const {
    if (plain && t.n == kColumns) {
      const float* sum = t.sum + first * kColumns;
      uint16_t* to = narrow->data + (t.i + first) * narrow->stride + t.j;
      for (int64_t i = first; i < last; ++i, sum += kColumns, to += narrow->stride) {
        BFloat16::store(to, load(sum), load(sum + kLanes));
      }
      return;
    }
    finish_tile(t.sum + first * kColumns, t.c + first * stride, stride, last - first, t.n, alpha, beta,
                narrow, t.i + first, t.j);
  }
};

// Memory that is prefetched for writing while a tile is multiplied: `rows` rows of at most two cache lines.
struct Target {
  char* data;
  int64_t stride, rows, second;  // strides in bytes; second: offset of the second cache line
};

// Multiplies a panel of a by a panel of b, and writes the tile `before`. `size` is the depth in pairs.
SHOESTRING_INLINE void add_panels(const float* a, const float* b, int64_t size, const Upcoming& next,
                                  const Target& target, const Output& output, const Unwritten& before) {
  const char* from = next.data;
  const int64_t steps = size / kAmxLines, some = (next.cache_lines + steps - 1) / steps,
                rows = (kPanel + steps - 1) / steps;
  int64_t lines_left = next.cache_lines, row = 0;
  for (int64_t p = 0; p < size; p += kAmxLines, a += 2 * kSquareSize, b += 2 * kSquareSize) {
    add_products(a, a + kSquareSize, 2 * kSquareSize, b, kAmxLines);
    for (int64_t k = lines_left < some ? lines_left : some; k > 0; --k, --lines_left, from += 64)
      __builtin_prefetch(from, 0, 2);
    const int64_t end = row + rows;
    if (row < before.m) output.write_rows(before, row, end < before.m ? end : before.m);
    for (int64_t r = row; r < end && r < target.rows; ++r) {
      __builtin_prefetch(target.data + r * target.stride, 1);
      __builtin_prefetch(target.data + r * target.stride + target.second, 1);
    }
    row = end;
  }
}

// Computes one tile of 32 x 32 results, of which m x n exist, and writes the tile `before`. Returns the tile
// itself if it is not written yet. in_tiles: c has room for the whole tile. `sum` is room for its sums.
SHOESTRING_INLINE Unwritten tile_amx(const float* a, const float* b, const Unwritten& tile, int64_t size,
                                     const Output& output, bool more, bool in_tiles,
                                     float (&sum)[kPanel][kColumns], const Upcoming& next,
                                     const Unwritten& before) {
  const int64_t stride = output.stride;
  const bool whole = in_tiles || (tile.m == kPanel && tile.n == kPanel);
  float* c = tile.c;
  Target target{reinterpret_cast<char*>(c), stride * 4, in_tiles ? 0 : tile.m, (kPanel - 1) * 4};
  if (output.narrow == nullptr) {
    if (whole && output.alpha == 1 && output.beta == 0) {
      if (more) {
        load_sums(c, stride);
        target.rows = 0;
      } else {
        zero_sums();
      }
      add_panels(a, b, size, next, target, output, before);
      store_sums(c, stride);
      return {};
    }
  } else {
    target = {reinterpret_cast<char*>(output.narrow->data + tile.i * output.narrow->stride + tile.j),
              output.narrow->stride * 2, tile.m, 0};
  }
  // Sums that continue those in c start from them in each tile, so all tiles round alike.
  if (more && whole) {
    load_sums(c, stride);
  } else if (more) {
    for (int64_t row = 0; row < kPanel; ++row) {
      for (int64_t k = 0; k < kPanel; k += kLanes) {
        store(sum[row] + k, row < tile.m ? load_some<Float>(c + row * stride + k, tile.n - k) : F32{});
      }
    }
    load_sums(sum[0], kColumns);
  } else {
    zero_sums();
  }
  add_panels(a, b, size, next, target, output, before);
  store_sums(sum[0], kColumns);
  return tile;
}

void multiply_amx(const float* a, const float* b, int64_t m, int64_t n, int64_t depth, float* c,
                  int64_t stride, float alpha, float beta, const kernels::GemmNarrow* narrow, bool b_outside,
                  const kernels::GemmAhead&) {
  const int64_t padded = (depth + kAmxDepth - 1) / kAmxDepth * kAmxDepth, panel = panel_size(depth);
  // Each tile prefetches its share of the next panel of the outer loop.
  const int64_t inner = ((b_outside ? m : n) + kPanel - 1) / kPanel,
                share = (panel / kAmxLines + inner - 1) / inner;
  const bool more = alpha == 1 && beta == 1;
  const bool in_tiles = stride == 0;
  const int64_t tiles = (n + kPanel - 1) / kPanel;  // number of tiles in a row of tiles
  const Output output{in_tiles ? kPanel : stride, alpha, more ? 0 : beta, narrow,
                      narrow != nullptr && !narrow->fp16 && narrow->gain == nullptr &&
                          narrow->offset == nullptr && alpha == 1 && (more || beta == 0)};
  alignas(64) float sums[2][kPanel][kColumns];
  Unwritten before{};
  int turn = 0;
  const auto at = [&](int64_t i, int64_t j) {
    const float* outer = (b_outside ? b + j / kPanel * panel : a + i / kPanel * panel) + panel;
    const Upcoming next{
        reinterpret_cast<const char*>(outer + (b_outside ? i : j) / kPanel * share * kAmxLines), share};
    turn = 1 - turn;
    float* at_c = in_tiles ? c + (i / kPanel * tiles + j / kPanel) * kPanel * kPanel : c + i * stride + j;
    const Unwritten tile{
        sums[turn][0], at_c, m - i < kPanel ? m - i : kPanel, n - j < kPanel ? n - j : kPanel, i, j};
    before = tile_amx(a + i / kPanel * panel, b + j / kPanel * panel, tile, padded / 2, output, more,
                      in_tiles, sums[turn], next, before);
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
  if (before.m > 0) output.write_rows(before, 0, before.m);
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
