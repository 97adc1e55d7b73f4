#pragma once

// Code that the Hopper kernels of attention share. A block has three warpgroups. One warp of the first
// warpgroup copies tiles ahead. Each of the other two warpgroups computes 64 rows of the result, and uses
// registers that the first warpgroup gives up. Matrix products run asynchronously, in parallel with the other
// work of the threads.

#include "cuda/attention/attention.h"
#include "cuda/attention/attention_scores.h"
#include "cuda/core/tensor_map.h"
#include "cuda/core/wgmma.h"

namespace shoestring::cuda {

/// Two warpgroups compute, and use registers that the copying warpgroup gives up. Three computing warpgroups
/// would have at most 160 registers per thread, too few for two tiles of scores plus the sums. Every thread
/// has 168 registers at launch.
constexpr int kHopperGroups = 2, kHopperRows = 64 * kHopperGroups, kHopperThreads = 128 * (kHopperGroups + 1);
constexpr int kCopyingRegisters = 40, kComputingRegisters = 232;

/// A tile in shared memory, laid out as tma_load writes it: panels of 64 features, one after the other.
/// `panel` and `bytes` are the sizes in bytes of a panel and of the tile.
template <int rows, int kFeatures>
struct HopperTile {
  static constexpr int panels = (kFeatures + 63) / 64, panel = rows * 128, bytes = panels * panel;
};

/// Tiles must begin at a multiple of 1024 bytes, but dynamic shared memory begins at a multiple of 16. A
/// launch therefore requests 1024 bytes more.
constexpr int kTileAlignment = 1024;
__device__ inline unsigned char* first_tile() {
  unsigned char* p = dynamic_shared();
  return p + (kTileAlignment - reinterpret_cast<uintptr_t>(p) % kTileAlignment) % kTileAlignment;
}

/// The rows over which a block iterates: `tiles` tiles of equal size, starting with row `begin`.
struct TileRange {
  int begin, tiles;
  __device__ TileRange(int first, int end, int rows)
      : begin(first), tiles(end > first ? (end - first + rows - 1) / rows : 0) {}
};

/// keys_seen returns the keys that the block's queries see; queries_that_see returns the queries that see the
/// block's keys. `rows` is the number of rows in a tile.
__device__ inline TileRange keys_seen(const Place& at, const Window& window, int rows) {
  const int first = at.tile * kHopperRows, behind = min(first + kHopperRows, at.queries);
  return {max(0, first + window.low), min(at.keys, behind + window.high), rows};
}
__device__ inline TileRange queries_that_see(const Place& at, const Window& window, int rows) {
  const int first = at.tile * kHopperRows, behind = min(first + kHopperRows, at.keys);
  return {max(0, first - window.high), min(at.queries, behind - window.low), rows};
}

/// Returns the tile of queries that this block handles. In causal attention, the last tiles of queries see
/// the most keys, so the blocks for these tiles start first.
__device__ inline Place place_of_queries(const AttentionProblem& p) {
  const int heads = static_cast<int>(p.heads), units = static_cast<int>(gridDim.x) / heads;
  const int unit = units - 1 - static_cast<int>(blockIdx.x) / heads;
  return find_tile(p, false, unit, kHopperRows, [](const char* text) { stop(text); });
}

/// Starts the copy of a tile to shared memory; its first row is token `token`. One thread calls this
/// function.
template <class Tile>
__device__ void load_tile(unsigned char* to, const TensorMap& map, Mbarrier& full, int token, int head,
                          int sequence) {
#pragma unroll
  for (int i = 0; i < Tile::panels; ++i)
    tma_load<4>(to + i * Tile::panel, map, full, {i * 64, token, head, sequence});
}

/// Writes zeros to the rows of a tile from row `first` on, which belong to another sequence. These rows may
/// contain infinity, and zero times infinity is NaN. A whole warp calls this function, and then async_fence()
/// and __syncwarp().
template <class Tile>
__device__ void clear_rows(unsigned char* tile, int first) {
  for (int i = first * 8 + lane(); i < Tile::panel / 16; i += kWarp) {
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel) {
      reinterpret_cast<uint4*>(tile + panel * Tile::panel)[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

/// Starts the product d = a b^T over kFeatures features. `a` is the descriptor of a tile with 64 rows, and
/// `b` that of a tile with 8 * kTiles rows.
template <class T, int kFeatures, int kTiles>
__device__ void start_rows_times_rows(float (&d)[kTiles][4], uint64_t a, uint64_t b) {
  wgmma_fence(d);
#pragma unroll
  for (int i = 0; i < kFeatures; i += 16) {
    wgmma<T, false>(d, a + wgmma_step(i, false, HopperTile<64, 64>::panel),
                    b + wgmma_step(i, false, HopperTile<kTiles * 8, 64>::panel), i > 0);
  }
  wgmma_commit();
}

/// Starts the product d += p b. p is in registers, in the layout that pack_scores writes. b is the descriptor
/// of a tile with one row for each column of p, plus the offset that wgmma_rows_together returns.
template <class T, int kTiles, int kSteps>
__device__ void start_scores_times_rows(float (&d)[kTiles][4], uint32_t (&p)[kSteps][4], uint64_t b) {
  wgmma_pin(p);
  wgmma_fence(d);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) wgmma<T, true>(d, p[i], b + wgmma_step(i * 16, true), true);
  wgmma_commit();
}

/// Rounds the result of a matrix product to 16 bits and packs it as the left operand of another product.
template <class T, int kTiles>
__device__ void pack_scores(uint32_t (&p)[kTiles / 2][4], const float (&s)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles / 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      p[i][e] = pack<T>(s[2 * i + e / 2][e % 2 * 2], s[2 * i + e / 2][e % 2 * 2 + 1]);
  }
}

/// Writes -inf to scores that a query may not see: column - row is outside of [low, high], or column >= end.
/// A warp's scores have 16 rows, from row `row` on, and their columns start at `column`.
template <int kTiles>
__device__ void mask_scores(float (&s)[kTiles][4], int low, int high, int end, int row, int column) {
  if (column + kTiles * 8 - 1 - row <= high && column - (row + 15) >= low && column + kTiles * 8 <= end)
    return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int element_row = row + lane() / 4 + i / 2 * 8, first = column + lane() % 4 * 2 + i % 2;
    const int from = element_row + low - first, to = min(element_row + high, end - 1) - first;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) s[j][i] = j * 8 >= from && j * 8 <= to ? s[j][i] : -INFINITY;
  }
}

/// Returns the factor by which cap_scores multiplies a product q k, so that the result is log2(e^(2x)) with x
/// = scale * q k / softcap. Since tanh x = 1 - 2 / (e^(2x) + 1), the cap takes one exponential and one
/// reciprocal. The factor is computed once, before the loop: a division calls a function, and no wgmma may be
/// in flight across a call.
__device__ inline float cap_factor(const AttentionProblem& p) { return 2 * kLog2e * p.scale / p.softcap; }

/// Converts products q k^T to capped scores, softcap * tanh(x). The absolute rounding error of tanh x is that
/// of a number near 1, also if x is small.
template <int kTiles>
__device__ void cap_scores(float (&s)[kTiles][4], float factor, float softcap) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[j][i] = softcap - 2 * softcap * fast_reciprocal(fast_exp2(s[j][i] * factor) + 1);
  }
}

// The functions below are for the backward pass. stats(j, i) returns the statistics of the query to which
// s[j][i] belongs: its log-sum-exp to base 2 and its delta.

/// Converts products q k^T in s to capped scores. `by` holds grad_out v^T and becomes (by - delta) * (1 -
/// tanh^2 x). The second factor is the derivative of the cap. Where tanh is flat, an error of the reciprocal
/// r near 1 remains: at most 2^-21. The form e r^2 with e = e^(2x) has none, and would take registers that
/// are not there.
template <int kTiles, class Stats>
__device__ void cap_scores(float (&s)[kTiles][4], float (&by)[kTiles][4], float factor, float softcap,
                           Stats stats) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float r = fast_reciprocal(fast_exp2(s[j][i] * factor) + 1);
      s[j][i] = softcap - 2 * softcap * r;
      by[j][i] = (by[j][i] - stats(j, i).delta) * (4 * r * (1 - r));
    }
  }
}

/// Converts the scores in s to probabilities: 2^(score * factor - log-sum-exp of the query).
template <int kTiles, class Stats>
__device__ void exponentiate(float (&s)[kTiles][4], float factor, Stats stats) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = s[j][i] * factor - stats(j, i).lse;
      // A probability is exp2(x) with x <= 0. With scores near 10^9, rounding may make x so large that exp2
      // would overflow, so positive x are replaced by 0.
      s[j][i] = fast_exp2(x > 0 ? 0.f : x);
    }
  }
}

/// Converts by = grad_out v^T to the gradient of the scores, given the probabilities s. If `capped`,
/// cap_scores has already subtracted delta from `by`.
template <int kTiles, class Stats>
__device__ void differentiate_softmax(const float (&s)[kTiles][4], float (&by)[kTiles][4], bool capped,
                                      Stats stats) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) by[j][i] = (capped ? by[j][i] : by[j][i] - stats(j, i).delta) * s[j][i];
  }
}

/// Encodes the tensor map for tiles of a tensor (features, tokens, heads, batch). A packed tensor has a batch
/// of 1. A tensor may have any stride in a dimension of size 1. The driver documents that a stride steps over
/// the dimensions inside of it, so the map gets such a stride there.
inline const char* encode_rows(TensorMap* map, const void* tensor, const HeadStrides& at, int64_t features,
                               int64_t tokens, int64_t heads, int64_t batch, int rows) {
  const int64_t sizes[] = {features, tokens, heads, batch};
  int64_t strides[] = {at.token * 2, at.head * 2, at.batch * 2};
  int64_t inside = (features * 2 + 15) / 16 * 16;  // bytes over which the dimensions so far extend
  for (int i = 0; i < 3; ++i) {
    if (sizes[i + 1] == 1) strides[i] = inside;
    inside = max(inside, strides[i] * sizes[i + 1]);
  }
  const int box[] = {64, rows, 1, 1};
  return encode_tensor_map(map, tensor, 4, sizes, strides, box);
}

/// The tensor maps of the arguments of one attention call. A TMA copy takes q_rows rows of q or grad_out, or
/// k_rows rows of k or v.
struct HopperMaps {
  TensorMap q, k, v, grad_out;

  const char* encode(const AttentionProblem& p, const AttentionTensors& t, int q_rows, int k_rows) {
    const int64_t batch = p.cu_seqlens_q != nullptr ? 1 : p.batch;
    const char* error = encode_rows(&q, t.q, t.q_at, p.head_dim, p.queries, p.heads, batch, q_rows);
    if (error == nullptr) error = encode_rows(&k, t.k, t.k_at, p.head_dim, p.keys, p.kv_heads, batch, k_rows);
    return error != nullptr ? error
                            : encode_rows(&v, t.v, t.v_at, p.value_dim, p.keys, p.kv_heads, batch, k_rows);
  }
  const char* encode(const AttentionProblem& p, const AttentionTensors& t, const AttentionGradients& g,
                     int q_rows, int k_rows) {
    if (const char* error = encode(p, t, q_rows, k_rows)) return error;
    const int64_t batch = p.cu_seqlens_q != nullptr ? 1 : p.batch;
    return encode_rows(&grad_out, g.grad_out, g.grad_out_at, p.value_dim, p.queries, p.heads, batch, q_rows);
  }
};

/// Calls run(Features<n>{}), where n is the smallest head dimension of the compiled Hopper kernels that is at
/// least `features`.
template <class Run>
const char* with_hopper_features(int64_t features, Run run) {
  if (features <= 64) return run(Features<64>{});
  if (features <= 96) return run(Features<96>{});
  if (features <= 128) return run(Features<128>{});
  return features <= 192 ? run(Features<192>{}) : run(Features<256>{});
}

}  // namespace shoestring::cuda
