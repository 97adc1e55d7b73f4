#pragma once

// The steps between the two products of attention: cap, bias, ALiBi, window and dropout. The options are
// tested once for each tile, so a call without options pays only for a branch. Positions count within a
// sequence, and each block finds its sequence by itself.

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

constexpr int kFar = 1 << 30;  // twice any distance between tokens; the host limits their number

/// A tile of a sequence. tile is -1 if there is no tile for the index. If packed, first_query and first_key
/// are the offsets of the sequence's tokens.
struct Place {
  int sequence, tile;
  int first_query, queries, first_key, keys;
};

/// Returns tile number `index` among the tiles of `rows` queries, or keys, of all sequences. Sequences of
/// equal length alternate from tile to tile; packed sequences follow each other. All lanes of a warp get the
/// same tile. Calls end(text) if the offsets are invalid.
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
      const int owner = __ffs(beyond) - 1, found = base + owner;
      const int first = before + __shfl_sync(kAllLanes, through - tiles, owner);
      const int q = p.cu_seqlens_q[found], k = p.cu_seqlens_k[found];
      const Place place{
          found, index - first, q, p.cu_seqlens_q[found + 1] - q, k, p.cu_seqlens_k[found + 1] - k};
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

/// Returns the number of tiles, or slightly more if packed.
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

/// Returns the row of lse of a sequence's first query.
__device__ inline int64_t first_row(const AttentionProblem& p, const Place& at, int head) {
  return (p.cu_seqlens_q != nullptr ? int64_t{head} : int64_t{at.sequence} * p.heads + head) * p.queries +
         at.first_query;
}

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

/// The scores of one sequence and one head. A warp's tile is (16 rows, kTiles * 8 columns). Rows are queries
/// or, if `turned`, keys.
class Scores {
 public:
  __device__ Scores(const AttentionProblem& problem, const Place& place, int head)
      : p(problem), at(place), window(problem, place) {
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

  /// Converts products to scores. A score times `factor` is an exponent of 2, and -inf marks keys that a
  /// query does not see. Multiplies `by` by the derivative of the cap, unless `by` is null.
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
        const bool seen =
            distance <= window.high && distance >= window.low && key < at.keys && query < at.queries;
        float x = s[j][i];
        if (special_ && seen) {
          x *= p.scale;
          if (p.softcap > 0) {
            const float t = tanhf(x / p.softcap);
            x = p.softcap * t;
            if (by != nullptr) by[j][i] *= 1 - t * t;
          }
          if (p.bias != nullptr) x += bias_value(p, bias_at_ + query * p.bias_query + key * p.bias_key);
          if (p.slopes != nullptr) x -= slope_ * static_cast<float>(abs(distance - (at.keys - at.queries)));
        }
        s[j][i] = seen ? x : -INFINITY;
      }
    }
  }

  __device__ bool drops() const { return p.seed != nullptr; }

  /// Returns a mask of probabilities: bit 4 j + i is 1 if s[j][i] is kept.
  template <bool turned, int kTiles>
  __device__ uint32_t kept(int first_row, int first_column) const {
    const auto seed = static_cast<uint64_t>(*p.seed);
    const int l = lane(), g = l / 4, t = l % 4;
    uint32_t all = 0;
    if constexpr (turned) {  // a lane draws bits for one query and eight keys, in two tiles
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        const uint32_t own = draw(seed, first_column + (j + l / 16) * 8 + l % 8, first_row / 8 + l / 8 % 2);
#pragma unroll
        for (int e = 0; e < 4 * min(2, kTiles - j); ++e) {
          const int from = e / 4 * 16 + e / 2 % 2 * 8 + 2 * t + e % 2;
          all |= (__shfl_sync(kAllLanes, own, from) >> g & 1) << (4 * j + e);
        }
      }
    } else {  // a lane draws bits for its two queries in one of four tiles
#pragma unroll
      for (int j = 0; j < kTiles; j += 4) {
        const int group = first_column / 8 + j + t;
        const uint32_t own = draw(seed, first_row + g, group) | draw(seed, first_row + g + 8, group) << 8;
#pragma unroll
        for (int e = 0; e < min(4, kTiles - j); ++e) {
          const uint32_t bits = __shfl_sync(kAllLanes, own, g * 4 + e) >> (2 * t);
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
  int64_t row;  // row of lse of the sequence's first query

 private:
  // Returns eight bits for a query and eight keys. A bit is 1 if the probability is kept.
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

  bool special_;
  float slope_ = 0;
  int64_t bias_at_;
};

}  // namespace shoestring::cuda
