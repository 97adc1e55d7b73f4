#pragma once

// The steps between the two matrix products of attention: softcap, bias, ALiBi, window and dropout. The
// kernels test once per tile whether the call uses any of these options, so without options the cost is one
// branch. The positions of queries and keys count from the start of their sequence. In packed tensors, each
// block searches for the sequence that contains its tile.

#include <climits>
#include <cstdint>

#include "attention/attention_table.h"
#include "core/philox.h"
#include "cuda/attention/attention_softmax.h"
#include "cuda/core/check.h"
#include "cuda/core/convert.h"
#include "cuda/core/warp.h"

namespace shoestring::cuda {

using kernels::AttentionProblem;
using kernels::BiasType;

// Forward and backward may add the terms of a product q k^T in different order. The rounding errors of a
// score, and of a log-sum-exp that follows it, are together at most kScoreError of their magnitude. If a
// product is above kLargeScore, they would decide the probability of the largest score, which has to be 1. So
// backward adds the error to such a score; probabilities above 1 become 1.
constexpr float kLargeScore = 0x1p20f, kScoreError = 0x1p-21f;

// greater than any distance between tokens: the host allows at most 2^29 tokens
constexpr int kFar = 1 << 30;

/// A tile of queries or keys within its sequence. `tile` is -1 if a block has no tile. In packed tensors,
/// first_query and first_key are the offsets at which the sequence's tokens begin; otherwise they are 0.
struct Place {
  int sequence, tile;
  int first_query, queries, first_key, keys;
};

/// Returns the tile with number `index` of all tiles of all sequences. A tile has `rows` queries, or keys if
/// of_keys. For sequences of equal length, the index counts the first tiles of all sequences, then the second
/// tiles, and so on. For packed sequences, it counts the tiles of one sequence after the other. All lanes of
/// a warp call the function with the same index. The function calls end(text) if the offsets cu_seqlens are
/// invalid.
template <class End>
__device__ Place find_tile(const AttentionProblem& p, bool of_keys, int index, int rows, End end) {
  const int sequences = static_cast<int>(p.batch), queries = static_cast<int>(p.queries),
            keys = static_cast<int>(p.keys);
  if (p.cu_seqlens_q == nullptr) return {index % sequences, index / sequences, 0, queries, 0, keys};
  const int32_t* starts = of_keys ? p.cu_seqlens_k : p.cu_seqlens_q;
  const int all = of_keys ? keys : queries;
  int before = 0;
  for (int base = 0; base < sequences; base += kWarp) {
    const int s = base + lane();
    int tiles = 0;
    if (s < sequences) {
      const int begin = starts[s], behind = starts[s + 1];
      if (begin < 0 || behind < begin || behind > all || (s == 0 && begin != 0) ||
          (s == sequences - 1 && behind != all)) {
        end("attention: cu_seqlens: expected offsets that rise from 0 to the number of tokens");
      }
      tiles = (behind - begin + rows - 1) / rows;
    }
    int through = tiles;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int x = __shfl_up_sync(kAllLanes, through, offset);
      if (lane() >= offset) through += x;
    }
    const unsigned beyond = __ballot_sync(kAllLanes, before + through > index);
    if (beyond != 0) {
      const int owner = __ffs(beyond) - 1, sequence = base + owner;
      const int first = before + __shfl_sync(kAllLanes, through - tiles, owner);
      const int q = p.cu_seqlens_q[sequence], k = p.cu_seqlens_k[sequence];
      const Place place{
          sequence, index - first, q, p.cu_seqlens_q[sequence + 1] - q, k, p.cu_seqlens_k[sequence + 1] - k};
      if (q < 0 || place.queries < 0 || place.queries > queries - q || k < 0 || place.keys < 0 ||
          place.keys > keys - k) {
        end("attention: cu_seqlens: expected offsets that rise from 0 to the number of tokens");
      }
      return place;
    }
    before += __shfl_sync(kAllLanes, through, kWarp - 1);
  }
  return {0, -1, 0, 0, 0, 0};
}

__device__ inline Place find_tile(const AttentionProblem& p, bool of_keys, int index, int rows) {
  return find_tile(p, of_keys, index, rows, [](const char* text) { fail(text); });
}

/// Returns the number of tiles of all sequences; for packed sequences, an upper bound of it.
inline int64_t tile_count(const AttentionProblem& p, bool of_keys, int rows) {
  const int64_t tokens = of_keys ? p.keys : p.queries;
  return p.cu_seqlens_q != nullptr ? tokens / rows + p.batch : (tokens + rows - 1) / rows * p.batch;
}

/// The window of attention: a query sees the keys with key - query in [low, high].
struct Window {
  int low, high;
  __device__ Window(const AttentionProblem& p, const Place& at) {
    const int64_t shift = at.keys - at.queries;
    low = static_cast<int>(max(shift - p.left, int64_t{-kFar}));
    high = static_cast<int>(min(shift + p.right, int64_t{kFar}));
  }
};

/// Returns the index of a sequence's first query in the tensor lse.
__device__ inline int64_t first_row(const AttentionProblem& p, const Place& at, int head) {
  return (p.cu_seqlens_q != nullptr ? int64_t{head} : int64_t{at.sequence} * p.heads + head) * p.queries +
         at.first_query;
}

/// Returns the bias at an offset as the number that is added to a score.
__device__ inline float bias_value(const AttentionProblem& p, int64_t at) {
  switch (p.bias_type) {
    case BiasType::kFloat:
      return static_cast<const float*>(p.bias)[at];
    case BiasType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(p.bias)[at]);
    case BiasType::kHalf:
      return to_float(static_cast<const __half*>(p.bias)[at]);
    default:
      return static_cast<const uint8_t*>(p.bias)[at] != 0 ? 0.f : -INFINITY;
  }
}

/// Computes the scores of one sequence and one head. A warp's tile of scores has 16 rows and kTiles * 8
/// columns. The rows are queries and the columns keys, or the other way round if `turned`.
class Scores {
 public:
  /// `log_sums` is the tensor lse in backward, and null in forward.
  __device__ Scores(const AttentionProblem& problem, const Place& place, int head,
                    const float* log_sums = nullptr)
      : p(problem), at(place), window(problem, place), lse_(log_sums) {
    special_ = p.softcap > 0 || p.bias != nullptr || p.slopes != nullptr || p.scale <= 0;
    factor = special_ ? kLog2e : p.scale * kLog2e;
    const bool packed = p.cu_seqlens_q != nullptr;
    row = first_row(p, at, head);
    bias_at_ = packed ? 0 : at.sequence * p.bias_batch;
    bias_at_ += head * p.bias_head + at.first_query * p.bias_query;
    if (p.slopes != nullptr) slope_ = p.slopes[at.sequence * p.slopes_batch + head];
    if (packed && p.bias != nullptr && p.bias_key != 0 && at.keys > p.bias_columns) {
      fail("attention: bias: expected at least as many columns as the longest sequence has keys");
    }
  }

  /// Says whether an option changes the scores. Then apply() subtracts each query's log-sum-exp in backward,
  /// and `factor` is log2(e).
  __device__ bool special() const { return special_; }

  /// Converts the products q k^T in s to scores, or to -inf for keys that a query does not see. The
  /// exponential of a score x is 2^(x * factor). Unless `by` is null, multiplies it by the derivative of the
  /// softcap.
  template <bool turned, int kTiles>
  __device__ void apply(float (&s)[kTiles][4], float (*by)[4], int first_row, int first_column) const {
    const int q = turned ? first_column : first_row, k = turned ? first_row : first_column;
    const int last_q = q + (turned ? kTiles * 8 : 16) - 1, last_k = k + (turned ? 16 : kTiles * 8) - 1;
    const bool whole =
        last_k - q <= window.high && k - last_q >= window.low && last_k < at.keys && last_q < at.queries;
    if (!special_ && whole) return;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = first_row + lane() / 4 + i / 2 * 8, c = first_column + j * 8 + lane() % 4 * 2 + i % 2;
        const int query = turned ? c : r, key = turned ? r : c, distance = key - query;
        const bool is_visible =
            distance <= window.high && distance >= window.low && key < at.keys && query < at.queries;
        float x = s[j][i];
        if (special_ && is_visible) {
          x *= p.scale;
          if (p.softcap > 0) {
            const float t = tanhf(x / p.softcap);
            x = p.softcap * t;
            if (by != nullptr) by[j][i] *= 1 - t * t;
          }
          const float product = fabsf(x);
          if (p.bias != nullptr) x += bias_value(p, bias_at_ + query * p.bias_query + key * p.bias_key);
          if (p.slopes != nullptr) x -= slope_ * static_cast<float>(abs(distance - (at.keys - at.queries)));
          if (lse_ != nullptr) {
            const float lse = lse_[row + query];
            x -= lse == -INFINITY ? 0.f : lse;
            x += product > kLargeScore ? product * kScoreError : 0.f;
          }
        }
        s[j][i] = is_visible ? x : -INFINITY;
      }
    }
  }

  __device__ bool drops() const { return p.seed != nullptr; }

  /// Returns a bit mask of the probabilities that dropout keeps: bit 4 j + i is 1 if s[j][i] is kept.
  template <bool turned, int kTiles>
  __device__ uint32_t kept(int first_row, int first_column) const {
    const auto seed = static_cast<uint64_t>(*p.seed);
    const int l = lane(), g = l / 4, t = l % 4;
    uint32_t all = 0;
    if constexpr (turned) {  // a lane draws the bits of one query and eight keys, for two of the 8 x 8 tiles
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        const uint32_t drawn = draw(seed, first_column + (j + l / 16) * 8 + l % 8, first_row / 8 + l / 8 % 2);
#pragma unroll
        for (int e = 0; e < 4 * min(2, kTiles - j); ++e) {
          const int from = e / 4 * 16 + e / 2 % 2 * 8 + 2 * t + e % 2;
          all |= (__shfl_sync(kAllLanes, drawn, from) >> g & 1) << (4 * j + e);
        }
      }
    } else {  // a lane draws the bits of its two queries and eight keys, for one of four 8 x 8 tiles
#pragma unroll
      for (int j = 0; j < kTiles; j += 4) {
        const int group = first_column / 8 + j + t;
        const uint32_t drawn = draw(seed, first_row + g, group) | draw(seed, first_row + g + 8, group) << 8;
#pragma unroll
        for (int e = 0; e < min(4, kTiles - j); ++e) {
          const uint32_t bits = __shfl_sync(kAllLanes, drawn, g * 4 + e) >> (2 * t);
          all |= ((bits & 3) | (bits >> 8 & 3) << 2) << (4 * (j + e));
        }
      }
    }
    return all;
  }

  const AttentionProblem& p;
  Place at;
  Window window;
  float factor;
  int64_t row;  // index of the sequence's first query in the tensor lse

 private:
  // Returns eight dropout bits, for a query and the eight keys from 8 * group on. A bit is 1 if the
  // probability is kept.
  __device__ uint32_t draw(uint64_t seed, int query, int group) const {
    const uint64_t step = uint64_t{kernels::kAttentionStream} << 32 | static_cast<uint32_t>(row + query);
    const kernels::Random4 random = kernels::philox_at(seed, step, static_cast<uint64_t>(group));
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      bits |= static_cast<uint32_t>((random.value[k / 2] >> (k % 2 * 16) & 0xffffu) >= p.threshold) << k;
    }
    return bits;
  }

  const float* lse_;
  bool special_;
  float slope_ = 0;
  int64_t bias_at_;
};

}  // namespace shoestring::cuda
