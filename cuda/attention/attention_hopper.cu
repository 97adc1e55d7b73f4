// Forward of attention on Hopper, after FlashAttention-3 (Shah et al., arXiv 2407.08608). Copies, matrix
// products and exponentials overlap. One warp copies tiles ahead. Two warpgroups compute, with 64 queries
// each. While a warpgroup computes the probabilities of a tile of keys, the tensor cores multiply the
// previous tile's probabilities with V. Since the two warpgroups take turns, the tensor cores also multiply
// the other warpgroup's queries with K.

#include "cuda/attention/attention_hopper.h"
#include "cuda/attention/attention_softmax.h"

namespace shoestring::cuda {
namespace {

// Sizes of the tiles of K and V. There are as many stages (buffers for a tile of K and one of V) as shared
// memory can hold. Up to 128 features, the two warpgroups take turns: one computes exponentials while the
// tensor cores run the other's products. Above 128 features they do not take turns, because the matrix
// products take most of the time anyway. Three warpgroups would have 160 registers per thread. Those cannot
// hold the accumulators of the output plus the scores and probabilities of 128 keys.
template <int D>
struct Tile {
  static constexpr int keys = D <= 128 ? 128 : 64, stages = D == 64 ? 4 : D == 192 ? 3 : 2;
  static constexpr bool turns = D <= 128;
  using own = HopperTile<64, D>;  // tile with the queries of one warpgroup
  using passing = HopperTile<keys, D>;
  static constexpr int shared_bytes =
      kTileAlignment + kHopperGroups * own::bytes + 2 * stages * passing::bytes;
};

template <int stages>
struct Barriers {
  Mbarrier q_full, v_landed, turn[kHopperGroups], k_full[stages], k_empty[stages], v_full[stages],
      v_empty[stages];
};

// Copies tiles of Q, K and V to shared memory. One warp runs this function, and its lane 0 starts the copies.
template <int D>
__device__ void copy_tiles(const AttentionProblem& p, const Place& at, int head, const TileRange& range,
                           const HopperMaps& maps, unsigned char* q_tile, unsigned char* k_tiles,
                           unsigned char* v_tiles, Barriers<Tile<D>::stages>& barriers) {
  using tile = Tile<D>;
  using own = typename tile::own;
  using passing = typename tile::passing;
  const bool packed = p.cu_seqlens_q != nullptr, starts = lane() == 0;
  const int sequence = packed ? 0 : at.sequence, kv_head = head / static_cast<int>(p.heads / p.kv_heads);
  const auto load = [&](const TensorMap& map, Mbarrier& full, unsigned char* to, int token) {
    mbarrier_arrive_expect(full, passing::bytes);
    load_tile<passing>(to, map, full, token, kv_head, sequence);
  };
  if (starts && range.tiles > 0) {
    mbarrier_arrive_expect(barriers.q_full, kHopperGroups * own::bytes);
    for (int i = 0; i < kHopperGroups; ++i) {
      const int query = at.first_query + at.tile * kHopperRows + i * 64;
      load_tile<own>(q_tile + i * own::bytes, maps.q, barriers.q_full, query, head, sequence);
    }
  }
  for (int n = 0; n < range.tiles; ++n) {
    const int stage = n % tile::stages, parity = n / tile::stages & 1, key = range.begin + n * tile::keys;
    unsigned char* v_tile = v_tiles + stage * passing::bytes;
    // If `foreign`, the tile ends with keys of the next sequence. Their rows of V must be set to zero. Their
    // rows of K may stay, because the scores are masked.
    const bool foreign = packed && key + tile::keys > at.keys;
    if (starts) {
      mbarrier_wait(barriers.k_empty[stage], parity ^ 1);
      load(maps.k, barriers.k_full[stage], k_tiles + stage * passing::bytes, at.first_key + key);
      mbarrier_wait(barriers.v_empty[stage], parity ^ 1);
      load(maps.v, foreign ? barriers.v_landed : barriers.v_full[stage], v_tile, at.first_key + key);
    }
    if (foreign) {   // only the last tile can contain keys of another sequence
      __syncwarp();  // the other lanes wait only after lane 0 has started the copies
      mbarrier_wait(barriers.v_landed, 0);
      clear_rows<passing>(v_tile, at.keys - key);
      async_fence();
      __syncwarp();
      if (starts) mbarrier_arrive(barriers.v_full[stage]);
    }
  }
}

template <class T, int D>
__device__ void compute_tiles(const AttentionProblem& p, const AttentionTensors& t, bool pairs,
                              const Place& at, int head, const Window& window, const TileRange& range,
                              int group, const unsigned char* q_tile, const unsigned char* k_tiles,
                              const unsigned char* v_tiles, Barriers<Tile<D>::stages>& barriers) {
  using tile = Tile<D>;
  using passing = typename tile::passing;
  const int warp_row = at.tile * kHopperRows + group * 64 + warp() % 4 * 16;
  const uint64_t q = wgmma_operand(q_tile + group * tile::own::bytes);
  const uint64_t k = wgmma_operand(k_tiles), v = wgmma_operand(v_tiles) + wgmma_rows_together(passing::panel);
  float s[tile::keys / 8][4], out[D / 8][4] = {};
  uint32_t probabilities[tile::keys / 16][4];
  Softmax softmax(p.sinks != nullptr ? p.sinks[head] : -INFINITY);
  const float factor = (p.softcap > 0 ? 1.f : p.scale) * kLog2e;
  const float capping = cap_factor(p);

  const auto start_scores = [&](int n) {
    mbarrier_wait(barriers.k_full[n % tile::stages], n / tile::stages & 1);
    start_rows_times_rows<T, D>(s, q, k + wgmma_bytes(n % tile::stages * passing::bytes));
  };
  const auto wait_for_v = [&](int n) {
    mbarrier_wait(barriers.v_full[n % tile::stages], n / tile::stages & 1);
  };
  const auto start_sums = [&](int n) {
    start_scores_times_rows<T>(out, probabilities, v + wgmma_bytes(n % tile::stages * passing::bytes));
  };
  const auto soften = [&](int n, float (&shrink)[2]) {
    if (p.softcap > 0) cap_scores(s, capping, p.softcap);
    mask_scores(s, window.low, window.high, at.keys, warp_row, range.begin + n * tile::keys);
    softmax.update(s, factor, shrink);
  };
  const auto release = [&](Mbarrier& barrier) {
    if (lane() == 0) mbarrier_arrive(barrier);
  };

  if (range.tiles > 0) {
    float shrink[2];
    // allows warpgroup 0 to start its products first
    if (tile::turns && group == 1) release(barriers.turn[0]);
    mbarrier_wait(barriers.q_full, 0);
    start_scores(0);
    wgmma_wait<0>(s);
    release(barriers.k_empty[0]);
    soften(0, shrink);
    wait_for_v(0);
    pack_scores<T>(probabilities, s);
    for (int n = 1; n < range.tiles; ++n) {
      if constexpr (tile::turns) mbarrier_wait(barriers.turn[group], (n & 1) ^ 1);
      start_scores(n);
      start_sums(n - 1);
      if constexpr (tile::turns) release(barriers.turn[group ^ 1]);
      wgmma_wait<1>(s);
      release(barriers.k_empty[n % tile::stages]);
      soften(n, shrink);
      // ptxas moves wgmma_wait upwards to the last jump. So the wait for V, a loop that the next product
      // needs, stands here. Otherwise the exponentials of soften() would follow the products.
      wait_for_v(n);
      wgmma_wait<0>(out);
      release(barriers.v_empty[(n - 1) % tile::stages]);
      // keeps the multiplications of scale_rows behind the release
      wgmma_pin(out);
      scale_rows(out, shrink);
      pack_scores<T>(probabilities, s);
    }
    start_sums(range.tiles - 1);
    wgmma_wait<0>(out);
  }

  float by[2], lse[2];
  softmax.finish(by, lse);
  const int64_t first = first_row(p, at, head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + lane() / 4 + 8 * r;
    if (lane() % 4 == 0 && row < at.queries) t.lse[first + row] = lse[r];
  }
  T* to = head_of(static_cast<T*>(t.out), t.out_at, at.sequence, head, at.first_query);
  store_rows<T, D>(to, t.out_at.token, warp_row, at.queries, static_cast<int>(p.value_dim), pairs, out, by);
}

// The registers in the budget are those at launch. Dynamic shared memory takes 145 KiB for 64 features, 161
// KiB for 96 and 128, and 193 KiB above.
// Budget: 168 registers, 160 bytes shared, no spills.
template <class T, int D>
__global__ void __launch_bounds__(kHopperThreads, 1)
    hopper_forward(const __grid_constant__ HopperMaps maps, AttentionProblem p, AttentionTensors t,
                   bool pairs) {
  using tile = Tile<D>;
  const int head = static_cast<int>(blockIdx.x) % static_cast<int>(p.heads);
  const Place at = place_of_queries(p);
  if (at.tile < 0) return;
  const Window window(p, at);
  const TileRange range = keys_seen(at, window, Tile<D>::keys);

  __shared__ Barriers<tile::stages> barriers;
  unsigned char *q_tile = first_tile(), *k_tiles = q_tile + kHopperGroups * tile::own::bytes;
  unsigned char* v_tiles = k_tiles + tile::stages * tile::passing::bytes;
  if (threadIdx.x == 0) {
    mbarrier_init(barriers.q_full, 1);
    mbarrier_init(barriers.v_landed, 1);
    for (int i = 0; i < kHopperGroups; ++i) mbarrier_init(barriers.turn[i], 4);
    for (int i = 0; i < tile::stages; ++i) {
      mbarrier_init(barriers.k_full[i], 1);
      mbarrier_init(barriers.v_full[i], 1);
      mbarrier_init(barriers.k_empty[i], 4 * kHopperGroups);
      mbarrier_init(barriers.v_empty[i], 4 * kHopperGroups);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp() < 4) {
    registers_shrink<kCopyingRegisters>();
    if (warp() == 0) copy_tiles<D>(p, at, head, range, maps, q_tile, k_tiles, v_tiles, barriers);
  } else {
    registers_grow<kComputingRegisters>();
    compute_tiles<T, D>(p, t, pairs, at, head, window, range, warp() / 4 - 1, q_tile, k_tiles, v_tiles,
                        barriers);
  }
}

bool tensor_map_takes(const void* tensor, const HeadStrides& at, int64_t tokens, int64_t heads,
                      int64_t batch) {
  const auto takes = [](int64_t size, int64_t stride) {
    return size == 1 || (stride > 0 && stride % 8 == 0);
  };
  return aligned(tensor) && takes(tokens, at.token) && takes(heads, at.head) && takes(batch, at.batch);
}

template <class T, int D>
const char* run(const AttentionProblem& p, const AttentionTensors& t, void* stream) {
  HopperMaps maps{};
  if (const char* error = maps.encode(p, t, 64, Tile<D>::keys)) return error;
  return launch(hopper_forward<T, D>, tile_count(p, false, kHopperRows) * p.heads, kHopperThreads,
                Tile<D>::shared_bytes, stream, maps, p, t, access_of(t.out, t.out_at, sizeof(T)).pairs);
}

}  // namespace

// The attention kernels for Hopper take any number of queries and keys. They do not support a bias, ALiBi or
// dropout.
bool hopper_serves(const AttentionProblem& p, const AttentionTensors& t) {
  const int64_t batch = p.cu_seqlens_q != nullptr ? 1 : p.batch;
  int capability = 0;
  return compute_capability(capability) == nullptr && capability == 90 && p.head_dim <= 256 &&
         p.value_dim <= 256 && p.bias == nullptr && p.slopes == nullptr && p.seed == nullptr && p.scale > 0 &&
         p.keys > 0 && tensor_map_takes(t.q, t.q_at, p.queries, p.heads, batch) &&
         tensor_map_takes(t.k, t.k_at, p.keys, p.kv_heads, batch) &&
         tensor_map_takes(t.v, t.v_at, p.keys, p.kv_heads, batch);
}

bool hopper_serves(const AttentionProblem& p, const AttentionTensors& t, const AttentionGradients& g) {
  const int64_t batch = p.cu_seqlens_q != nullptr ? 1 : p.batch;
  return hopper_serves(p, t) && p.queries > 0 &&
         tensor_map_takes(g.grad_out, g.grad_out_at, p.queries, p.heads, batch);
}

template <class T>
const char* hopper_attention(const AttentionProblem& p, const AttentionTensors& t, void* stream) {
  return with_hopper_features(max(p.head_dim, p.value_dim),
                              [&](auto features) { return run<T, decltype(features)::value>(p, t, stream); });
}
template const char* hopper_attention<__nv_bfloat16>(const AttentionProblem&, const AttentionTensors&, void*);
template const char* hopper_attention<__half>(const AttentionProblem&, const AttentionTensors&, void*);

}  // namespace shoestring::cuda
