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

void adjust(const kernels::AttentionPanel& panel, int64_t first_key, int64_t keys, const float* added,
            bool edge, float* scores, float* cap_slope) {
  const F32 cap = splat(panel.softcap);
  // Distances between tokens are exact in fp32 up to 2^24. Longer sequences are impractical on the CPU.
  const float start = static_cast<float>(first_key - panel.position);
  const F32 left = splat(-static_cast<float>(panel.left)), right = splat(static_cast<float>(panel.right));
  for (int64_t j = 0; j < keys; ++j, scores += kColumns) {
    for (int w = 0; w < kWide; ++w) {
      F32 s = load(scores + w * kLanes);
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

template <bool kBrief>
void soften(float* scores, int64_t keys, const float* mask, float* highest, float* sums, float* out,
            int64_t lines) {
  F32 best[kWide], before[kWide], sum[kWide], shrink[kWide];
  for (int w = 0; w < kWide; ++w) best[w] = before[w] = load(highest + w * kLanes);
  F32 other[kWide] = {best[0], best[1]};
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
  bool grew = false;
  for (int w = 0; w < kWide; ++w) {
    best[w] = max(best[w], other[w]);
    shrink[w] = exp_of<kBrief>(before[w] - finite(best[w]));
    grew |= any(before[w] < best[w]);
    store(highest + w * kLanes, best[w]);
    best[w] = finite(best[w]);
    sum[w] = F32{};
  }
  for (j = 0; j < keys; ++j, scores += kColumns) {
    for (int w = 0; w < kWide; ++w) {
      F32 p = exp_of<kBrief>(load(scores + w * kLanes) - best[w]);
      sum[w] = sum[w] + p;
      if (mask != nullptr) p = p * load(mask + j * kColumns + w * kLanes);
      store(scores + w * kLanes, p);
    }
  }
  for (int w = 0; w < kWide; ++w) store(sums + w * kLanes, load(sums + w * kLanes) * shrink[w] + sum[w]);
  if (!grew) return;
  for (int64_t i = 0; i < lines; ++i, out += kColumns) {
    for (int w = 0; w < kWide; ++w) store(out + w * kLanes, load(out + w * kLanes) * shrink[w]);
  }
}

void finish(const float* highest, const float* sums, float* out, int64_t lines, float* lse) {
  F32 factor[kWide];
  for (int w = 0; w < kWide; ++w) {
    const F32 sum = load(sums + w * kLanes);
    factor[w] = sum == 0 ? F32{} : 1.f / sum;
  }
  for (int i = 0; i < kColumns; ++i) lse[i] = sums[i] == 0 ? kLow : highest[i] + ::logf(sums[i]);
  for (int64_t i = 0; i < lines; ++i, out += kColumns) {
    for (int w = 0; w < kWide; ++w) store(out + w * kLanes, load(out + w * kLanes) * factor[w]);
  }
}

template <bool kBrief>
void differentiate(float* scores, float* by_p, int64_t keys, const float* mask, const float* lse,
                   const float* delta) {
  for (int w = 0; w < kWide; ++w) {
    const F32 known = load(lse + w * kLanes), less = load(delta + w * kLanes);
    // A query that sees no key has a log-sum-exp of -inf. Replacing it by +inf makes its probabilities 0.
    const F32 highest = known == kLow ? splat(-kLow) : known;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * kColumns + w * kLanes;
      // Rounding may make a score slightly larger than the log-sum-exp that includes it, so the difference is
      // limited to 0.
      const F32 p = exp_of<kBrief>(min(splat(0.f), load(scores + at) - highest));
      F32 gradient = load(by_p + at), used = p;
      if (mask != nullptr) {
        const F32 kept = load(mask + at);
        gradient = gradient * kept, used = p * kept;
      }
      store(scores + at, used);
      store(by_p + at, p * (gradient - less));
    }
  }
}

void multiply(float* to, const float* factors, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(to + i) * load(factors + i));
}

void mask(uint64_t seed, uint32_t first_row, int64_t first_key, int64_t keys, uint32_t threshold, float kept,
          float* out) {
  uint16_t bits[kernels::kRandomBlock];
  for (int i = 0; i < kColumns; ++i) {
    int64_t known = -1;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t key = first_key + j;
      if (key / kernels::kRandomBlock != known) {
        known = key / kernels::kRandomBlock;
        random_block(seed, first_row + static_cast<uint32_t>(i), kernels::kAttentionStream,
                     static_cast<uint64_t>(known), bits);
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
                                        finish,
                                        {differentiate<false>, differentiate<true>},
                                        multiply,
                                        mask,
                                        dots,
                                        store_rows<Float>,
                                        store_rows<BFloat16>,
                                        store_rows<Half>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
