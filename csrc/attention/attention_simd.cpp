// Vectorised CPU kernels for the steps of attention between the matrix products. The lanes of a register are
// queries, and the rows of a tile are keys. The maximum and the sum of a query therefore stay in one lane,
// without shuffles. The resulting tile is already a packed panel, which the next matrix product reads
// directly.

#include <math.h>

#include "attention/attention_table.h"
#include "core/element_simd.h"
#include "core/philox_simd.h"
#include "core/row_simd.h"
#include "gemm/gemm_table.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
extern const kernels::AttentionTable attention;

namespace {

// number of vector registers in a row of a tile of scores; must equal kWide of the GEMM kernels
constexpr int kWide = 2;
constexpr int kColumns = kWide * kLanes;

SHOESTRING_INLINE F32 lanes_from(float first) {
  F32 v;
  for (int i = 0; i < kLanes; ++i) v[i] = first + static_cast<float>(i);
  return v;
}

// A query that sees no key has a log-sum-exp of -inf. Replacing it by +inf makes its probabilities 0.
SHOESTRING_INLINE F32 usable(F32 lse) { return lse == kLow ? splat(-kLow) : lse; }

void adjust(const kernels::AttentionPanel& panel, int64_t first_key, int64_t keys, const float* added,
            bool edge, const float* lse, float* scores, float* cap_slope) {
  const F32 cap = splat(panel.softcap);
  // Distances between tokens are exact in fp32 up to 2^24. Longer sequences are impractical on the CPU.
  const float start = static_cast<float>(first_key - panel.position);
  const F32 left = splat(-static_cast<float>(panel.left)), right = splat(static_cast<float>(panel.right));
  for (int64_t j = 0; j < keys; ++j, scores += kColumns) {
    for (int w = 0; w < kWide; ++w) {
      F32 s = load(scores + w * kLanes) * panel.scale;
      if (panel.softcap != 0) {
        const F32 t = tanh(s / cap);
        s = cap * t;
        if (cap_slope != nullptr) store(cap_slope + j * kColumns + w * kLanes, 1.f - t * t);
      }
      if (added != nullptr) s = s + load(added + j * kColumns + w * kLanes);
      if (panel.slope != 0 || edge) {
        const F32 distance =
            splat(start + static_cast<float>(j)) - lanes_from(static_cast<float>(w * kLanes));
        if (panel.slope != 0) s = s - panel.slope * abs(distance);
        if (edge) {
          s = distance < left ? splat(kLow) : s;
          s = distance > right ? splat(kLow) : s;
        }
      }
      if (lse != nullptr) s = s - usable(load(lse + w * kLanes));
      store(scores + w * kLanes, s);
    }
  }
}

// Replaces a maximum of -inf by 0, so that e^(-inf - maximum) is 0 and not NaN.
SHOESTRING_INLINE F32 finite(F32 highest) { return highest == kLow ? F32{} : highest; }

template <bool kBrief>
SHOESTRING_INLINE F32 exp_of(F32 x) {
  return kBrief ? short_exp_of_negative(x) : exp_of_negative(x);
}

// State of the softmax of a tile's queries while one more tile of keys is added.
struct Softmax {
  F32 best[kWide], shrink[kWide], sum[kWide];  // new maxima, factors of the sums so far, sums of the tile
  bool grew;                                   // whether a maximum grew
};

template <bool kBrief>
SHOESTRING_INLINE Softmax begin_softmax(const float* scores, int64_t keys, float scale, float* highest) {
  Softmax s;
  F32 best[kWide], other[kWide];
  for (int w = 0; w < kWide; ++w) best[w] = other[w] = splat(kLow);
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) {
    for (int w = 0; w < kWide; ++w) {
      best[w] = max(best[w], load(scores + j * kColumns + w * kLanes));
      other[w] = max(other[w], load(scores + (j + 1) * kColumns + w * kLanes));
    }
  }
  if (j < keys) {
    for (int w = 0; w < kWide; ++w) best[w] = max(best[w], load(scores + j * kColumns + w * kLanes));
  }
  s.grew = false;
  for (int w = 0; w < kWide; ++w) {
    const F32 before = load(highest + w * kLanes);
    const F32 after = max(before, max(best[w], other[w]) * scale);
    s.shrink[w] = exp_of<kBrief>(before - finite(after));
    s.grew |= any(before < after);
    store(highest + w * kLanes, after);
    s.best[w] = finite(after);
    s.sum[w] = F32{};
  }
  return s;
}

SHOESTRING_INLINE void end_softmax(const Softmax& s, float* sums, float* out, int64_t lines) {
  for (int w = 0; w < kWide; ++w) store(sums + w * kLanes, load(sums + w * kLanes) * s.shrink[w] + s.sum[w]);
  if (!s.grew) return;
  for (int64_t i = 0; i < lines; ++i, out += kColumns) {
    for (int w = 0; w < kWide; ++w) store(out + w * kLanes, load(out + w * kLanes) * s.shrink[w]);
  }
}

template <bool kBrief>
void soften(float* scores, int64_t keys, const float* mask, float scale, float* highest, float* sums,
            float* out, int64_t lines) {
  Softmax s = begin_softmax<kBrief>(scores, keys, scale, highest);
  for (int64_t j = 0; j < keys; ++j, scores += kColumns) {
    for (int w = 0; w < kWide; ++w) {
      F32 p = exp_of<kBrief>(fma(load(scores + w * kLanes), splat(scale), -s.best[w]));
      s.sum[w] = s.sum[w] + p;
      if (mask != nullptr) p = p * load(mask + j * kColumns + w * kLanes);
      store(scores + w * kLanes, p);
    }
  }
  end_softmax(s, sums, out, lines);
}

// Returns the part of a + b that the rounded sum lacks (Knuth's TwoSum), or 0 if the sum is not finite.
SHOESTRING_INLINE float rest_of(float a, float b, float sum) {
  const float of_b = sum - a, rest = (a - (sum - of_b)) + (b - of_b);
  return rest - rest == 0 ? rest : 0.f;
}

void finish(const float* highest, const float* sums, float* out, int64_t lines, float* lse, float* lse_rest) {
  F32 factor[kWide];
  for (int w = 0; w < kWide; ++w) {
    const F32 sum = load(sums + w * kLanes);
    factor[w] = sum == 0 ? F32{} : 1.f / sum;
  }
  for (int i = 0; i < kColumns; ++i) {
    const float log = ::logf(sums[i]);
    lse[i] = sums[i] == 0 ? kLow : highest[i] + log;
    if (lse_rest != nullptr) lse_rest[i] = rest_of(highest[i], log, lse[i]);
  }
  for (int64_t i = 0; i < lines; ++i, out += kColumns) {
    for (int w = 0; w < kWide; ++w) store(out + w * kLanes, load(out + w * kLanes) * factor[w]);
  }
}

struct Derivative {
  F32 probability, gradient;
};
// Returns p * mask and the gradient of the score, at element `at` of the tile.
template <bool kBrief>
SHOESTRING_INLINE Derivative derivative(const float* scores, const float* by_p, const float* mask, int64_t at,
                                        float scale, F32 lse, F32 delta) {
  // Rounding may make a score slightly larger than the log-sum-exp that includes it, so the difference is
  // limited to 0.
  const F32 p = exp_of<kBrief>(min(splat(0.f), fma(load(scores + at), splat(scale), -lse)));
  const F32 gradient = load(by_p + at);
  if (mask == nullptr) return {p, p * (gradient - delta)};
  const F32 kept = load(mask + at);
  return {p * kept, p * (gradient * kept - delta)};
}

template <bool kBrief>
void differentiate(float* scores, float* by_p, int64_t keys, const float* mask, float scale, const float* lse,
                   const float* delta) {
  for (int w = 0; w < kWide; ++w) {
    const F32 highest = usable(load(lse + w * kLanes)), less = load(delta + w * kLanes);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * kColumns + w * kLanes;
      const Derivative d = derivative<kBrief>(scores, by_p, mask, at, scale, highest, less);
      store(scores + at, d.probability);
      store(by_p + at, d.gradient);
    }
  }
}

#if defined(__AVX512F__)
#pragma GCC push_options
#pragma GCC target("avx512bf16")

constexpr int64_t kPairDepth = 32;  // the depth of packed bf16 panels is padded to a multiple of this

// Rounds two registers to bf16. The numbers of `first` are in the lower half of the result.
SHOESTRING_INLINE __m512i rounded(F32 first, F32 second) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// Writes two depth steps of a packed panel, given the bf16 numbers of both steps for half of the columns.
SHOESTRING_INLINE void store_pair_row(float* to, __m512i both) {
  __m512i order;
  {
    alignas(64) uint16_t i[32];
    for (int k = 0; k < 32; ++k) i[k] = static_cast<uint16_t>(k / 2 + k % 2 * 16);
    __builtin_memcpy(&order, i, sizeof i);
  }
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
}

// Sets the rest of a packed panel with `keys` depth steps to zero.
SHOESTRING_INLINE void clear_pairs(float* pairs, int64_t keys) {
  const int64_t end = (keys + kPairDepth - 1) / kPairDepth * kPairDepth / 2;
  for (int64_t j = (keys + 1) / 2; j < end; ++j) {
    for (int w = 0; w < kWide; ++w) store(pairs + j * kColumns + w * kLanes, F32{});
  }
}

void soften_pairs(const float* scores, int64_t keys, const float* mask, float scale, float* highest,
                  float* sums, float* out, int64_t lines, float* pairs) {
  Softmax s = begin_softmax<true>(scores, keys, scale, highest);
  const auto one = [&](int64_t j, int w) __attribute__((always_inline)) {
    const int64_t at = j * kColumns + w * kLanes;
    const F32 p = exp_of<true>(fma(load(scores + at), splat(scale), -s.best[w]));
    s.sum[w] = s.sum[w] + p;
    return mask != nullptr ? p * load(mask + at) : p;
  };
  for (int64_t j = 0; j < keys; j += 2) {
    for (int w = 0; w < kWide; ++w) {
      const F32 p = one(j, w), next = j + 1 < keys ? one(j + 1, w) : F32{};
      store_pair_row(pairs + j / 2 * kColumns + w * kLanes, rounded(p, next));
    }
  }
  clear_pairs(pairs, keys);
  end_softmax(s, sums, out, lines);
}

// Returns the place of key j in the tiles of `rows`.
SHOESTRING_INLINE float* row_of_tile(const kernels::AttentionRows& rows, int64_t j) {
  return rows.to + j / 16 * rows.stride + j % 16 * kLanes;
}

void differentiate_tiles(const float* scores, const float* by_p, int64_t keys, const float* mask, float scale,
                         const float* lse, const float* delta, const kernels::AttentionRows& probabilities,
                         const kernels::AttentionRows& gradients, float* pairs) {
  F32 highest[kWide], less[kWide];
  for (int w = 0; w < kWide; ++w)
    highest[w] = usable(load(lse + w * kLanes)), less[w] = load(delta + w * kLanes);
  for (int64_t j = 0; j < keys; j += 2) {
    F32 gradient[2][kWide] = {};
    for (int64_t i = 0; i < (keys - j < 2 ? keys - j : 2); ++i) {
      F32 probability[kWide];
      for (int w = 0; w < kWide; ++w) {
        const Derivative d =
            derivative<true>(scores, by_p, mask, (j + i) * kColumns + w * kLanes, scale, highest[w], less[w]);
        probability[w] = d.probability, gradient[i][w] = d.gradient;
      }
      _mm512_storeu_si512(row_of_tile(probabilities, j + i), rounded(probability[0], probability[1]));
      _mm512_storeu_si512(row_of_tile(gradients, j + i), rounded(gradient[i][0], gradient[i][1]));
    }
    for (int w = 0; w < kWide; ++w)
      store_pair_row(pairs + j / 2 * kColumns + w * kLanes, rounded(gradient[0][w], gradient[1][w]));
  }
  clear_pairs(pairs, keys);
}

void round_tiles(const float* from, int64_t keys, const kernels::AttentionRows& rows, float* pairs) {
  for (int64_t j = 0; j < keys; ++j, from += kColumns) {
    const F32 first = load(from), second = load(from + kLanes);
    _mm512_storeu_si512(row_of_tile(rows, j), rounded(first, second));
    if (pairs == nullptr || j % 2 != 0) continue;
    float* to = pairs + j / 2 * kColumns;
    store_pair_row(to, rounded(first, j + 1 < keys ? load(from + kColumns) : F32{}));
    store_pair_row(to + kLanes, rounded(second, j + 1 < keys ? load(from + kColumns + kLanes) : F32{}));
  }
  if (pairs != nullptr) clear_pairs(pairs, keys);
}
#pragma GCC pop_options
#else
constexpr decltype(kernels::AttentionTable::soften_pairs) soften_pairs = nullptr;
constexpr decltype(kernels::AttentionTable::differentiate_tiles) differentiate_tiles = nullptr;
constexpr decltype(kernels::AttentionTable::round_tiles) round_tiles = nullptr;
#endif

void multiply(float* to, const float* factors, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(to + i) * load(factors + i));
}

void mask(uint64_t seed, uint32_t first_row, int64_t first_key, int64_t keys, uint32_t threshold, float kept,
          float* out) {
  uint16_t bits[kernels::kRandomBlock];
  for (int i = 0; i < kColumns; ++i) {
    int64_t block = -1;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t key = first_key + j;
      if (key / kernels::kRandomBlock != block) {
        block = key / kernels::kRandomBlock;
        random_block(seed, first_row + static_cast<uint32_t>(i), kernels::kAttentionStream,
                     static_cast<uint64_t>(block), bits);
      }
      out[j * kColumns + i] = bits[key % kernels::kRandomBlock] < threshold ? 0.f : kept;
    }
  }
}

void dots(const float* a, const float* b, int64_t size, float* out) {
  F32 sum[kWide] = {};
  for (int64_t i = 0; i < size; ++i, a += kColumns, b += kColumns) {
    for (int w = 0; w < kWide; ++w) sum[w] = fma(load(a + w * kLanes), load(b + w * kLanes), sum[w]);
  }
  for (int w = 0; w < kWide; ++w) store(out + w * kLanes, sum[w]);
}

template <class Element>
void store_rows(const float* rows, int64_t stride, int64_t count, int64_t size, float scale,
                typename Element::Type* to, int64_t to_stride) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < size; j += kColumns) {
      const float* from = rows + i * stride + j;
      typename Element::Type* row = to + i * to_stride + j;
      const int64_t n = size - j;
      const F32 first = load(from) * scale, second = n > kLanes ? load(from + kLanes) * scale : F32{};
      if (n >= kColumns) {
        Element::store(row, first, second);
      } else {
        typename Element::Type some[kColumns];
        Element::store(some, first, second);
        __builtin_memcpy(row, some, n * sizeof some[0]);
      }
    }
  }
}

}  // namespace

const kernels::AttentionTable attention{adjust,
                                        {soften<false>, soften<true>},
                                        soften_pairs,
                                        finish,
                                        {differentiate<false>, differentiate<true>},
                                        differentiate_tiles,
                                        round_tiles,
                                        multiply,
                                        mask,
                                        dots,
                                        store_rows<Float>,
                                        store_rows<BFloat16>,
                                        store_rows<Half>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
