// Kernels of linear_cross_entropy for CPUs with AMX. A tile holds the logits of 32 tokens, side by side, for
// a range of classes. The largest logit and the sum of exponentials of each token are therefore computed
// without sums across a register. The gradient is rounded to bf16 and stored as the packed operands of the
// two matrix products that read it.

#include "losses/linear_cross_entropy_tiles_table.h"

#include "core/element_simd.h"
#include "core/exp_simd.h"
#include "gemm/panels_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
extern const kernels::LinearCrossEntropyTiles linear_cross_entropy_tiles;

#if defined(__AVX512F__)
#pragma GCC push_options
#pragma GCC target("avx512bf16")
namespace {

using kernels::kTileTokens;
using kernels::LogitTile;
using kernels::TileOperands;
using kernels::TileStatistics;
using kernels::TileUpstream;

constexpr int64_t kHalves = kTileTokens / kLanes;  // registers that hold one row of a tile
static_assert(kHalves == 2);
constexpr int64_t kPanelClasses = 32;  // classes in a panel of the left operand

SHOESTRING_INLINE F32 logit(const LogitTile& tile, int64_t i, int64_t half) {
  const F32 z = load(tile.z + i * kTileTokens + half * kLanes);
  return fma(z, splat(tile.scale), tile.bias != nullptr ? splat(tile.bias[i]) : F32{});
}

bool has_target(const LogitTile& tile) {
  for (int64_t t = 0; t < kTileTokens; ++t) {
    if (tile.target[t] >= 0 && tile.target[t] < tile.classes) return true;
  }
  return false;
}

void tile_statistics(const LogitTile& tile, const TileStatistics& s) {
  F32 before[kHalves], best[kHalves], sum[kHalves];
  for (int h = 0; h < kHalves; ++h) best[h] = before[h] = load(s.largest + h * kLanes);
  for (int64_t i = 0; i < tile.classes; ++i) {
    for (int h = 0; h < kHalves; ++h) best[h] = max(logit(tile, i, h), best[h]);
  }
  for (int h = 0; h < kHalves; ++h) sum[h] = load(s.sum + h * kLanes) * exp_of_negative(before[h] - best[h]);
  for (int64_t i = 0; i < tile.classes; ++i) {
    for (int h = 0; h < kHalves; ++h) sum[h] += exp_of_negative(logit(tile, i, h) - best[h]);
  }
  for (int h = 0; h < kHalves; ++h) {
    store(s.largest + h * kLanes, best[h]);
    store(s.sum + h * kLanes, sum[h]);
  }
  if (!has_target(tile)) return;
  for (int64_t t = 0; t < kTileTokens; ++t) {
    const int32_t i = tile.target[t];
    if (i < 0 || i >= tile.classes) continue;
    s.at_target[t] = logit(tile, i, t / kLanes)[t % kLanes];
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

// Computes the gradients of one class.
template <bool kTarget>
SHOESTRING_INLINE void gradient_row(const LogitTile& tile, const TileUpstream& u, int64_t i,
                                    F32 (&gradient)[kHalves]) {
  for (int h = 0; h < kHalves; ++h) {
    const F32 p = short_exp_of_negative(logit(tile, i, h) - load(u.lse + h * kLanes));
    gradient[h] = p * load(u.factor + h * kLanes);
    if (kTarget) {
      const I32 hit = load_as<I32>(tile.target + h * kLanes) == static_cast<int32_t>(i);
      gradient[h] -= as_float(as_bits(load(u.at_target + h * kLanes)) & (U32)hit);
    }
  }
}

template <bool kTarget>
void tile_gradient(const LogitTile& tile, const TileUpstream& upstream, const TileOperands& out,
                   const char* next, int64_t bytes) {
  __m512i interleave;
  {
    alignas(64) uint16_t order[2 * kLanes];
    for (int k = 0; k < 2 * kLanes; ++k) order[k] = static_cast<uint16_t>(k / 2 + k % 2 * kLanes);
    __builtin_memcpy(&interleave, order, sizeof order);
  }
  const int64_t padded = (tile.classes + kPanelClasses - 1) / kPanelClasses * kPanelClasses;
  const char* const end = next + bytes;
  for (int64_t i = 0; i < padded; i += 2) {
    for (int k = 0; k < 4 && next < end; ++k, next += 64) __builtin_prefetch(next, 0, 2);
    F32 rows[2][kHalves] = {};
    if (i < tile.classes) gradient_row<kTarget>(tile, upstream, i, rows[0]);
    if (i + 1 < tile.classes) gradient_row<kTarget>(tile, upstream, i + 1, rows[1]);
    if (out.sums != nullptr) {
      for (int r = 0; r < 2 && i + r < tile.classes; ++r) {
        float* to = out.sums + (i + r) * kLanes;
        store(to, load(to) + (rows[r][0] + rows[r][1]));
      }
    }
    if (out.left != nullptr) {
      float* to = out.left + i / kPanelClasses * out.left_stride + i % kPanelClasses * kLanes;
      for (int r = 0; r < 2; ++r) store(to + r * kLanes, (F32)_mm512_cvtne2ps_pbh(rows[r][1], rows[r][0]));
    }
    if (out.right != nullptr) {
      for (int h = 0; h < kHalves; ++h) {
        const auto both = (__m512i)_mm512_cvtne2ps_pbh(rows[1][h], rows[0][h]);
        store(out.right + i / 2 * kTileTokens + h * kLanes, (F32)_mm512_permutexvar_epi16(interleave, both));
      }
    }
  }
}

void gradient(const LogitTile& tile, const TileUpstream& upstream, const TileOperands& out, const void* next,
              int64_t bytes) {
  (has_target(tile) ? tile_gradient<true> : tile_gradient<false>)(tile, upstream, out,
                                                                  static_cast<const char*>(next), bytes);
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

const kernels::LinearCrossEntropyTiles linear_cross_entropy_tiles{tile_statistics, combine_statistics,
                                                                  gradient, transpose_tokens};
#else
const kernels::LinearCrossEntropyTiles linear_cross_entropy_tiles{};
#endif

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
