#pragma once

// Code that attention's Hopper kernels share. A block has three warpgroups. One warp of the first warpgroup
// copies tiles ahead. Each of the two others computes 64 rows of the result, with registers that the first
// warpgroup gives up. Products run asynchronously, in parallel with the other work of the threads.

#include "cuda/attention/attention.h"
#include "cuda/attention/attention_scores.h"
#include "cuda/core/tensor_map.h"
#include "cuda/core/wgmma.h"

namespace shoestring::cuda {

/// Two warpgroups compute and use the registers that the copying warpgroup gives up. Three would have at most
/// 160 registers per thread, too few for two tiles of scores plus the sums. A thread has 168 registers at
/// launch.
constexpr int kHopperGroups = 2, kHopperRows = 64 * kHopperGroups, kHopperThreads = 128 * (kHopperGroups + 1);
constexpr int kCopyingRegisters = 40, kComputingRegisters = 232;

/// A tile of rows in shared memory, in panels of 64 features, laid out as tma_load writes them. Sizes are in
/// bytes.
template <int rows, int kFeatures>
struct HopperTile {
  static constexpr int panels = (kFeatures + 63) / 64, panel = rows * 128, bytes = panels * panel;
};

/// Tiles begin at a multiple of 1024 bytes, but dynamic shared memory begins at a multiple of 16. A launch
/// therefore requests 1024 bytes more.
constexpr int kTileAlignment = 1024;
__device__ inline unsigned char* first_tile() {
  unsigned char* p = dynamic_shared();
  return p + (kTileAlignment - reinterpret_cast<uintptr_t>(p) % kTileAlignment) % kTileAlignment;
}

/// The tiles over which a block iterates: `tiles` tiles of `rows` rows, the first from row `begin` on.
struct TileRange {
  int begin, tiles;
  __device__ TileRange(int first, int end, int rows)
      : begin(first), tiles(end > first ? (end - first + rows - 1) / rows : 0) {}
};

/// Returns the keys that a block's queries see, or the queries that see a block's keys, in tiles of `rows`.
__device__ inline TileRange keys_seen(const Place& at, const Window& window, int rows) {
  const int first = at.tile * kHopperRows, behind = min(first + kHopperRows, at.queries);
  return {max(0, first + window.low), min(at.keys, behind + window.high), rows};
}
__device__ inline TileRange queries_that_see(const Place& at, const Window& window, int rows) {
  const int first = at.tile * kHopperRows, behind = min(first + kHopperRows, at.keys);
  return {max(0, first - window.high), min(at.queries, behind - window.low), rows};
}

/// Returns the queries of the block. The last tiles of causal sequences have the most keys, so they start
/// first.
__device__ inline Place place_of_queries(const AttentionProblem& p) {
  const int heads = static_cast<int>(p.heads), units = static_cast<int>(gridDim.x) / heads;
  const int unit = units - 1 - static_cast<int>(blockIdx.x) / heads;
  return find_tile(p, false, unit, kHopperRows, [](const char* text) { stop(text); });
}

/// Starts the copy of a tile's rows from `token` on. One thread calls this function.
template <class Tile>
__device__ void load_tile(unsigned char* to, const TensorMap& map, Mbarrier& full, int token, int head,
                          int sequence) {
#pragma unroll
  for (int i = 0; i < Tile::panels; ++i)
    tma_load<4>(to + i * Tile::panel, map, full, {i * 64, token, head, sequence});
}

/// Writes zeros to the tile's rows from `first` on, which belong to another sequence. They may be infinite,
/// and zero times infinity is not zero. A warp calls this function, and then async_fence() and __syncwarp().
template <class Tile>
__device__ void clear_rows(unsigned char* tile, int first) {
  for (int i = first * 8 + lane(); i < Tile::panel / 16; i += kWarp) {
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel) {
      reinterpret_cast<uint4*>(tile + panel * Tile::panel)[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

/// Starts d = a b^T over kFeatures features. a is a tile of 64 rows, and b has 8 rows for each of d's tiles.
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

/// Starts d += p b. p is in registers as pack_scores leaves it. b is a tile with a row for each column of p,
/// prepared by wgmma_rows_together.
template <class T, int kTiles, int kSteps>
__device__ void start_scores_times_rows(float (&d)[kTiles][4], uint32_t (&p)[kSteps][4], uint64_t b) {
  wgmma_pin(p);
  wgmma_fence(d);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) wgmma<T, true>(d, p[i], b + wgmma_step(i * 16, true), true);
  wgmma_commit();
}

/// Converts the result of a product to the left operand of the next product.
template <class T, int kTiles>
__device__ void pack_scores(uint32_t (&p)[kTiles / 2][4], const float (&s)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles / 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      p[i][e] = pack<T>(s[2 * i + e / 2][e % 2 * 2], s[2 * i + e / 2][e % 2 * 2 + 1]);
  }
}

/// Masks scores: writes -inf where column - row is outside of [low, high] or where column >= end. A warp has
/// 16 rows, from `row` on; the columns start at `column`.
template <int kTiles>
__device__ void mask_scores(float (&s)[kTiles][4], int low, int high, int end, int row, int column) {
  if (column + kTiles * 8 - 1 - row <= high && column - (row + 15) >= low && column + kTiles * 8 <= end)
    return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int own = row + lane() / 4 + i / 2 * 8, first = column + lane() % 4 * 2 + i % 2;
    const int from = own + low - first, to = min(own + high, end - 1) - first;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) s[j][i] = j * 8 >= from && j * 8 <= to ? s[j][i] : -INFINITY;
  }
}

/// Returns the factor that turns a product into log2(e^(2x)). Since tanh x = 1 - 2 / (e^(2x) + 1), the cap
/// takes one exponential and one reciprocal. The factor is computed once, before the loop: a division calls a
/// function, and no wgmma may be in flight across a call.
__device__ inline float cap_factor(const AttentionProblem& p) { return 2 * kLog2e * p.scale / p.softcap; }

/// Converts products to capped scores. The rounding error of tanh is that of a number near 1.
template <int kTiles>
__device__ void cap_scores(float (&s)[kTiles][4], float factor, float softcap) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[j][i] = softcap - 2 * softcap * fast_reciprocal(fast_exp2(s[j][i] * factor) + 1);
  }
}

// The functions below are for backward. stats(j, i) returns the log-sum-exp in powers of 2 and the delta of
// the query of element i of tile j.

/// Converts products to capped scores, and by to (by - delta) times the derivative of the cap, 1 - tanh^2 x.
/// This derivative is computed without cancellation.
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

/// Converts scores to probabilities.
template <int kTiles, class Stats>
__device__ void exponentiate(float (&s)[kTiles][4], float factor, Stats stats) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = s[j][i] * factor - stats(j, i).lse;
      // Scores of 10^9 round by more than exp2 can take, so x is limited to at most 0.
      s[j][i] = fast_exp2(x > 0 ? 0.f : x);
    }
  }
}

/// Converts by = grad_out v^T to the gradient of the scores. capped: cap_scores has already subtracted delta.
template <int kTiles, class Stats>
__device__ void differentiate_softmax(const float (&s)[kTiles][4], float (&by)[kTiles][4], bool capped,
                                      Stats stats) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) by[j][i] = (capped ? by[j][i] : by[j][i] - stats(j, i).delta) * s[j][i];
  }
}

/// Encodes the tensor map of tiles in (features, tokens, heads, batch). A packed tensor has a batch of 1. The
/// stride of a dimension of size 1 does not matter.
inline const char* encode_rows(TensorMap* map, const void* tensor, const HeadStrides& at, int64_t features,
                               int64_t tokens, int64_t heads, int64_t batch, int rows) {
  const auto bytes = [](int64_t size, int64_t stride) { return size == 1 ? 16 : stride * 2; };
  const int64_t sizes[] = {features, tokens, heads, batch};
  const int64_t strides[] = {bytes(tokens, at.token), bytes(heads, at.head), bytes(batch, at.batch)};
  const int box[] = {64, rows, 1, 1};
  return encode_tensor_map(map, tensor, 4, sizes, strides, box);
}

/// The tensor maps of a call. One copy takes q_rows rows of q and grad_out, or k_rows rows of k and v.
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

/// Calls run(Features<n>{}) with the smallest tile of 16-bit elements that these kernels have.
template <class Run>
const char* with_hopper_features(int64_t features, Run run) {
  if (features <= 64) return run(Features<64>{});
  if (features <= 96) return run(Features<96>{});
  if (features <= 128) return run(Features<128>{});
  return features <= 192 ? run(Features<192>{}) : run(Features<256>{});
}

}  // namespace shoestring::cuda
