// Kernels of linear_cross_entropy for CPUs with AMX. A tile holds the logits of 32 tokens, side by side, for
// 32 classes. The largest logit and the sum of exponentials of each token are therefore computed without sums
// across a register. The gradient is rounded to bf16 and stored as the packed operands of the two matrix
// products that read it.
//
// AMX is a unit of its own. While it multiplies a tile, the vector units compute the exponentials of the tile
// before: after each step of the product, they process some rows.

#include "losses/linear_cross_entropy_tiles_table.h"

#include "core/element_simd.h"
#include "core/exp_simd.h"
#include "gemm/panels_simd.h"
#include "gemm/tile_registers_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
extern const kernels::LinearCrossEntropyTiles linear_cross_entropy_tiles;

#if defined(__AVX512F__)
#pragma GCC push_options
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")
namespace {

using kernels::kTileClasses;
using kernels::kTileTokens;
using kernels::LogitBlock;
using kernels::TileOperands;
using kernels::TileStatistics;
using kernels::TileUpstream;

constexpr int64_t kHalves = kTileTokens / kLanes;  // registers that hold one row of a tile
constexpr int64_t kPairs = kTileClasses / 2;       // pairs of rows in a tile
static_assert(kHalves == 2 && kTileTokens == kPanel && kTileClasses == kPanel);

using Tile = float[kTileClasses][kTileTokens];

// Multiplies panel number `panel` of the weights by the hidden states. In between, calls work(pair) for each
// pair of rows of a tile.
template <class Work>
SHOESTRING_INLINE void multiply_tile(const LogitBlock& block, int64_t panel, Tile& z, Work work) {
  const float *a = block.weight + panel * block.weight_stride, *b = block.hidden;
  const int64_t steps = block.depth / (2 * kSquare), pairs = (kPairs + steps - 1) / steps;
  zero_sums();
  int64_t pair = 0;
  for (int64_t step = 0; step < steps; ++step, a += 2 * kSquareSize, b += 2 * kSquareSize) {
    add_square_products(a, a + kSquareSize, b);
    const int64_t end = pair + pairs < kPairs ? pair + pairs : kPairs;
    for (; pair < end; ++pair) work(pair);
  }
  store_sums(z[0], kTileTokens);
}

// Returns the number of classes in a tile.
SHOESTRING_INLINE int64_t rows_of(const LogitBlock& block, int64_t panel) {
  const int64_t rest = block.classes - panel * kTileClasses;
  return rest < kTileClasses ? rest : kTileClasses;
}

SHOESTRING_INLINE F32 logit(const LogitBlock& block, int64_t panel, const Tile& z, int64_t row,
                            int64_t half) {
  const float* bias = block.bias != nullptr ? block.bias + panel * kTileClasses + row : nullptr;
  return fma(load(z[row] + half * kLanes), splat(block.scale), bias != nullptr ? splat(*bias) : F32{});
}

// Returns the row of the tile that belongs to each token's target; other numbers than 0 to 31 if the target
// is in no row.
SHOESTRING_INLINE I32 target_rows(const LogitBlock& block, int64_t panel, int64_t half) {
  return load_as<I32>(block.target + half * kLanes) -
         (block.first_class + static_cast<int32_t>(panel * kTileClasses));
}
SHOESTRING_INLINE bool has_target(const LogitBlock& block, int64_t panel) {
  const auto in = [&](int64_t half) {
    return _mm512_cmplt_epu32_mask((__m512i)target_rows(block, panel, half), _mm512_set1_epi32(kTileClasses));
  };
  return (in(0) | in(1)) != 0;
}

// The statistics of the tokens while the kernel runs. `best` may already be the largest logit of a tile whose
// exponentials are not yet in `sum`.
struct Running {
  F32 best[kHalves], sum[kHalves];
};

// Takes the largest logits of a tile into account.
SHOESTRING_INLINE void raise(const LogitBlock& block, int64_t panel, const Tile& z, Running& s) {
  const int64_t rows = rows_of(block, panel);
  F32 best[kHalves];
  for (int h = 0; h < kHalves; ++h) best[h] = s.best[h];
  for (int64_t i = 0; i < rows; ++i) {
    for (int h = 0; h < kHalves; ++h) best[h] = max(logit(block, panel, z, i, h), best[h]);
  }
  for (int h = 0; h < kHalves; ++h) {
    s.sum[h] *= exp_of_negative(s.best[h] - best[h]);
    s.best[h] = best[h];
  }
}

SHOESTRING_INLINE void add_row(const LogitBlock& block, int64_t panel, const Tile& z, int64_t row,
                               Running& s) {
  for (int h = 0; h < kHalves; ++h) {
    s.sum[h] += exp_of_negative(logit(block, panel, z, row, h) - s.best[h]);
  }
}

void keep_targets(const LogitBlock& block, int64_t panel, const Tile& z, float* at_target) {
  const int64_t first = block.first_class + panel * kTileClasses, rows = rows_of(block, panel);
  for (int64_t t = 0; t < kTileTokens; ++t) {
    const int64_t i = block.target[t] - first;
    if (i >= 0 && i < rows) at_target[t] = logit(block, panel, z, i, t / kLanes)[t % kLanes];
  }
}

void block_statistics(const LogitBlock& block, const TileStatistics& statistics) {
  alignas(64) Tile z[2];
  Running s;
  for (int h = 0; h < kHalves; ++h) {
    s.best[h] = load(statistics.largest + h * kLanes);
    s.sum[h] = load(statistics.sum + h * kLanes);
  }
  const int64_t panels = (block.classes + kTileClasses - 1) / kTileClasses;
  start_tiles();
  for (int64_t panel = 0; panel < panels; ++panel) {
    Tile &now = z[panel % 2], &before = z[1 - panel % 2];
    if (panel == 0) {
      multiply_tile(block, panel, now, [](int64_t) {});
    } else {
      multiply_tile(block, panel, now, [&](int64_t pair) {
        add_row(block, panel - 1, before, 2 * pair, s);
        add_row(block, panel - 1, before, 2 * pair + 1, s);
      });
    }
    raise(block, panel, now, s);
    if (has_target(block, panel)) keep_targets(block, panel, now, statistics.at_target);
  }
  stop_tiles();
  for (int64_t i = 0; i < rows_of(block, panels - 1); ++i) {
    add_row(block, panels - 1, z[(panels - 1) % 2], i, s);
  }
  for (int h = 0; h < kHalves; ++h) {
    store(statistics.largest + h * kLanes, s.best[h]);
    store(statistics.sum + h * kLanes, s.sum[h]);
  }
}

void combine_statistics(int64_t parts, int64_t stride, float* largest, float* sum) {
  for (int64_t t = 0; t < kTileTokens; t += kLanes) {
    F32 best = load(largest + t), total{};
    for (int64_t i = 1; i < parts; ++i) best = max(load(largest + i * stride + t), best);
    for (int64_t i = 0; i < parts; ++i) {
      total += load(sum + i * stride + t) * exp_of_negative(load(largest + i * stride + t) - best);
    }
    store(largest + t, best);
    store(sum + t, total);
  }
}

// Computes and stores the gradients of a block's tiles.
struct Gradient {
  const LogitBlock& block;
  const TileUpstream& upstream;
  const TileOperands& out;
  __m512i interleave;
  const char *next, *end;  // memory to prefetch

  // Computes the gradients of one class.
  template <bool kTarget>
  SHOESTRING_METHOD void row(int64_t panel, const Tile& z, int64_t i, F32 (&gradient)[kHalves]) const {
    for (int h = 0; h < kHalves; ++h) {
      const F32 e = short_exp_of_negative(logit(block, panel, z, i, h) - load(upstream.largest + h * kLanes));
      gradient[h] = e * load(upstream.factor + h * kLanes);
      if (kTarget) {
        const I32 hit = target_rows(block, panel, h) == static_cast<int32_t>(i);
        gradient[h] -= as_float(as_bits(load(upstream.at_target + h * kLanes)) & (U32)hit);
      }
    }
  }

  // Computes two of the first `rows` rows of a tile. Other rows get zeros.
  template <bool kTarget>
  SHOESTRING_METHOD void pair(int64_t panel, const Tile& z, int64_t pair, int64_t rows) {
    const int64_t i = 2 * pair;
    for (int k = 0; k < 2 && next < end; ++k, next += 64) __builtin_prefetch(next, 0, 2);
    F32 both[2][kHalves] = {};
    if (i < rows) row<kTarget>(panel, z, i, both[0]);
    if (i + 1 < rows) row<kTarget>(panel, z, i + 1, both[1]);
    if (out.sums != nullptr) {
      for (int r = 0; r < 2 && i + r < rows; ++r) {
        float* to = out.sums + (panel * kTileClasses + i + r) * kLanes;
        store(to, load(to) + (both[r][0] + both[r][1]));
      }
    }
    if (out.left != nullptr) {
      float* to = out.left + panel * out.left_stride + i * kLanes;
      for (int r = 0; r < 2; ++r) store(to + r * kLanes, (F32)_mm512_cvtne2ps_pbh(both[r][1], both[r][0]));
    }
    if (out.right != nullptr) {
      float* to = out.right + (panel * kPairs + pair) * kTileTokens;
      for (int h = 0; h < kHalves; ++h) {
        const auto rounded = (__m512i)_mm512_cvtne2ps_pbh(both[1][h], both[0][h]);
        store(to + h * kLanes, (F32)_mm512_permutexvar_epi16(interleave, rounded));
      }
    }
  }
};

void block_gradient(const LogitBlock& block, const TileUpstream& upstream, const TileOperands& out,
                    const void* next, int64_t bytes) {
  alignas(64) uint16_t order[2 * kLanes];
  for (int k = 0; k < 2 * kLanes; ++k) order[k] = static_cast<uint16_t>(k / 2 + k % 2 * kLanes);
  const char* first = static_cast<const char*>(next);
  Gradient gradient{block, upstream, out, _mm512_load_si512(order), first, first + bytes};
  alignas(64) Tile z[2];
  const int64_t panels = (block.classes + kTileClasses - 1) / kTileClasses;
  start_tiles();
  for (int64_t panel = 0; panel < panels; ++panel) {
    Tile &now = z[panel % 2], &before = z[1 - panel % 2];
    if (panel == 0) {
      multiply_tile(block, panel, now, [](int64_t) {});
    } else if (has_target(block, panel - 1)) {
      multiply_tile(block, panel, now,
                    [&](int64_t pair) { gradient.pair<true>(panel - 1, before, pair, kTileClasses); });
    } else {
      multiply_tile(block, panel, now,
                    [&](int64_t pair) { gradient.pair<false>(panel - 1, before, pair, kTileClasses); });
    }
  }
  stop_tiles();
  const int64_t last = panels - 1;
  for (int64_t pair = 0; pair < kPairs; ++pair)
    gradient.pair<true>(last, z[last % 2], pair, rows_of(block, last));
}

void transpose_tokens(const float* z, int64_t tokens, int64_t columns, uint16_t* const* rows) {
  for (int64_t half = 0; half < tokens; half += kLanes) {
    const int64_t count = tokens - half < kLanes ? tokens - half : kLanes;
    for (int64_t c = 0; c < columns; c += kLanes) {
      F32 block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = load(z + (c + i) * kTileTokens + half);
      transpose(block);
      const auto mask = static_cast<__mmask16>(first_lanes(columns - c < kLanes ? columns - c : kLanes));
      for (int64_t i = 0; i < count; ++i) {
        _mm256_mask_storeu_epi16(rows[half + i] + c, mask, (__m256i)_mm512_cvtneps_pbh(block[i]));
      }
    }
  }
}

}  // namespace
#pragma GCC pop_options

const kernels::LinearCrossEntropyTiles linear_cross_entropy_tiles{block_statistics, combine_statistics,
                                                                  block_gradient, transpose_tokens};
#else
const kernels::LinearCrossEntropyTiles linear_cross_entropy_tiles{};
#endif

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
