// The gradient of the queries on Hopper. A block has 128 queries of a head, with their rows of grad_out, and
// iterates over the keys that these queries see. While a warpgroup computes exponentials for a tile of keys,
// the tensor cores do two other products. They add the previous tile's part to the gradient, and multiply
// grad_out by the current tile of V.

#include "cuda/attention/attention_backward.h"
#include "cuda/attention/attention_hopper.h"

namespace shoestring::cuda {
namespace {

// Tile sizes, which registers limit. With D features, a lane holds D / 2 elements of the gradient of queries.
// It also holds keys / 2 scores and as many gradients of scores; their packed 16-bit copies take half as many
// registers. A tile of K is needed for the scores, and again for the gradient while the next tile of K is in
// use.
template <int D>
struct Tile {
  static constexpr int keys = D <= 128 ? 96 : D == 192 ? 64 : 48;
  static constexpr int k_stages = D == 256 ? 2 : 3, v_stages = 2;
  using own = HopperTile<64, D>;  // tile with the queries of one warpgroup
  using passing = HopperTile<keys, D>;
  // Offsets in bytes, in dynamic shared memory, of the tiles of grad_out, K and V. The tile of Q is at offset
  // 0.
  static constexpr int grad_out = kHopperGroups * own::bytes, k = 2 * grad_out,
                       v = k + k_stages * passing::bytes;
  static constexpr int shared_bytes = kTileAlignment + v + v_stages * passing::bytes;
};

template <int D>
struct Barriers {
  Mbarrier own_full, landed;
  Mbarrier k_full[Tile<D>::k_stages], k_empty[Tile<D>::k_stages], v_full[Tile<D>::v_stages],
      v_empty[Tile<D>::v_stages];
};

// Copies tiles of Q, grad_out, K and V to shared memory. One warp runs this function, and its lane 0 starts
// the copies.
template <int D>
__device__ void copy_tiles(const AttentionProblem& p, const Place& at, int head, const TileRange& range,
                           const HopperMaps& maps, unsigned char* tiles, Barriers<D>& barriers) {
  using tile = Tile<D>;
  using own = typename tile::own;
  using passing = typename tile::passing;
  const bool packed = p.cu_seqlens_q != nullptr, starts = lane() == 0;
  const int sequence = packed ? 0 : at.sequence, kv_head = head / static_cast<int>(p.heads / p.kv_heads);
  if (starts && range.tiles > 0) {
    mbarrier_arrive_expect(barriers.own_full, 2 * kHopperGroups * own::bytes);
    for (int i = 0; i < kHopperGroups; ++i) {
      const int query = at.first_query + at.tile * kHopperRows + i * 64;
      load_tile<own>(tiles + i * own::bytes, maps.q, barriers.own_full, query, head, sequence);
      load_tile<own>(tiles + tile::grad_out + i * own::bytes, maps.grad_out, barriers.own_full, query, head,
                     sequence);
    }
  }
  for (int n = 0; n < range.tiles; ++n) {
    const int k_stage = n % tile::k_stages, v_stage = n % tile::v_stages, key = range.begin + n * tile::keys;
    unsigned char* k_tile = tiles + tile::k + k_stage * passing::bytes;
    unsigned char* v_tile = tiles + tile::v + v_stage * passing::bytes;
    const bool foreign = packed && key + tile::keys > at.keys;
    if (starts) {
      mbarrier_wait(barriers.k_empty[k_stage], (n / tile::k_stages & 1) ^ 1);
      Mbarrier& k_full = foreign ? barriers.landed : barriers.k_full[k_stage];
      mbarrier_arrive_expect(k_full, passing::bytes);
      load_tile<passing>(k_tile, maps.k, k_full, at.first_key + key, kv_head, sequence);
      mbarrier_wait(barriers.v_empty[v_stage], (n / tile::v_stages & 1) ^ 1);
      Mbarrier& v_full = foreign ? barriers.landed : barriers.v_full[v_stage];
      mbarrier_arrive_expect(v_full, passing::bytes);
      load_tile<passing>(v_tile, maps.v, v_full, at.first_key + key, kv_head, sequence);
    }
    if (foreign) {   // only the last tile can contain keys of another sequence
      __syncwarp();  // the other lanes wait only after lane 0 has started the copies
      mbarrier_wait(barriers.landed, 0);
      clear_rows<passing>(k_tile, at.keys - key);
      clear_rows<passing>(v_tile, at.keys - key);
      async_fence();
      __syncwarp();
      if (starts) mbarrier_arrive(barriers.k_full[k_stage]), mbarrier_arrive(barriers.v_full[v_stage]);
    }
  }
}

template <class T, int D>
__device__ void compute_tiles(const AttentionProblem& p, const AttentionTensors& t,
                              const AttentionGradients& g, bool pairs, const Place& at, int head,
                              const Window& window, const TileRange& range, int group, unsigned char* tiles,
                              Barriers<D>& barriers) {
  using tile = Tile<D>;
  using passing = typename tile::passing;
  const int warp_row = at.tile * kHopperRows + group * 64 + warp() % 4 * 16;
  const uint64_t first = wgmma_operand(tiles), q = first + wgmma_bytes(group * tile::own::bytes);
  const uint64_t grad_out = q + wgmma_bytes(tile::grad_out);
  float s[tile::keys / 8][4], by[tile::keys / 8][4], sums[D / 8][4] = {};
  uint32_t by_scores[tile::keys / 16][4];
  const int64_t row = first_row(p, at, head);
  const int query = warp_row + lane() / 4;
  const QueryStats two[2] = {stats_of(t, g, row, at.queries, query),
                             stats_of(t, g, row, at.queries, query + 8)};
  const auto stats = [&](int, int i) { return two[i / 2]; };
  const bool capped = p.softcap > 0;
  const float factor = (capped ? 1.f : p.scale) * kLog2e, capping = cap_factor(p);

  const auto start_scores = [&](int n) {
    const int stage = n % tile::k_stages;
    mbarrier_wait(barriers.k_full[stage], n / tile::k_stages & 1);
    start_rows_times_rows<T, D>(s, q, first + wgmma_bytes(tile::k + stage * passing::bytes));
  };
  const auto start_by = [&](int n) {
    const int stage = n % tile::v_stages;
    mbarrier_wait(barriers.v_full[stage], n / tile::v_stages & 1);
    start_rows_times_rows<T, D>(by, grad_out, first + wgmma_bytes(tile::v + stage * passing::bytes));
  };
  const auto start_sums = [&](int n) {
    const uint64_t k = first + wgmma_bytes(tile::k + n % tile::k_stages * passing::bytes);
    start_scores_times_rows<T>(sums, by_scores, k + wgmma_rows_together(passing::panel));
  };
  const auto release = [&](Mbarrier& barrier) {
    if (lane() == 0) mbarrier_arrive(barrier);
  };
  const auto exponentiate_scores = [&](int n) {
    if (capped) {
      wgmma_wait<0>(by);
      cap_scores(s, by, capping, p.softcap, stats);
    }
    mask_scores(s, window.low, window.high, at.keys, warp_row, range.begin + n * tile::keys);
    exponentiate(s, factor, stats);
  };
  const auto differentiate_scores = [&](int n) {
    wgmma_wait<0>(by);
    release(barriers.v_empty[n % tile::v_stages]);
    differentiate_softmax(s, by, capped, stats);
    pack_scores<T>(by_scores, by);
  };

  if (range.tiles > 0) {
    mbarrier_wait(barriers.own_full, 0);
    start_scores(0);
    start_by(0);
    wgmma_wait<1>(s);
    exponentiate_scores(0);
    differentiate_scores(0);
    for (int n = 1; n < range.tiles; ++n) {
      start_scores(n);
      start_sums(n - 1);
      start_by(n);
      wgmma_wait<2>(s);
      exponentiate_scores(n);
      wgmma_wait<1>(sums);
      release(barriers.k_empty[(n - 1) % tile::k_stages]);
      differentiate_scores(n);
    }
    start_sums(range.tiles - 1);
    wgmma_wait<0>(sums);
  }
  T* to = head_of(static_cast<T*>(g.q), g.q_at, at.sequence, head, at.first_query);
  store_rows<T, D>(to, g.q_at.token, warp_row, at.queries, static_cast<int>(p.head_dim), pairs, sums,
                   {p.scale, p.scale});
}

// The registers in the budget are those at launch. Dynamic shared memory takes 93 KiB for 64 features, 185
// KiB for 96 and 128, 217 KiB for 192, and 225 KiB for 256.
// Budget: 168 registers, 96 bytes shared, no spills.
template <class T, int D>
__global__ void __launch_bounds__(kHopperThreads, 1)
    query_gradient(const __grid_constant__ HopperMaps maps, AttentionProblem p, AttentionTensors t,
                   AttentionGradients g, bool pairs) {
  using tile = Tile<D>;
  const int head = static_cast<int>(blockIdx.x) % static_cast<int>(p.heads);
  const Place at = place_of_queries(p);
  if (at.tile < 0) return;
  const Window window(p, at);
  const TileRange range = keys_seen(at, window, Tile<D>::keys);

  __shared__ Barriers<D> barriers;
  unsigned char* const tiles = first_tile();
  if (threadIdx.x == 0) {
    mbarrier_init(barriers.own_full, 1);
    mbarrier_init(barriers.landed, 2);
    for (int i = 0; i < tile::k_stages; ++i) {
      mbarrier_init(barriers.k_full[i], 1);
      mbarrier_init(barriers.k_empty[i], 4 * kHopperGroups);
    }
    for (int i = 0; i < tile::v_stages; ++i) {
      mbarrier_init(barriers.v_full[i], 1);
      mbarrier_init(barriers.v_empty[i], 4 * kHopperGroups);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp() < 4) {
    registers_shrink<kCopyingRegisters>();
    if (warp() == 0) copy_tiles<D>(p, at, head, range, maps, tiles, barriers);
  } else {
    registers_grow<kComputingRegisters>();
    compute_tiles<T, D>(p, t, g, pairs, at, head, window, range, warp() / 4 - 1, tiles, barriers);
  }
}

}  // namespace

template <class T>
const char* hopper_query_gradient(const AttentionProblem& p, const AttentionTensors& t,
                                  const AttentionGradients& g, void* stream) {
  return with_hopper_features(max(p.head_dim, p.value_dim), [&](auto features) {
    constexpr int D = decltype(features)::value;
    HopperMaps maps{};
    if (const char* error = maps.encode(p, t, g, 64, Tile<D>::keys)) return error;
    return launch(query_gradient<T, D>, tile_count(p, false, kHopperRows) * p.heads, kHopperThreads,
                  Tile<D>::shared_bytes, stream, maps, p, t, g, access_of(g.q, g.q_at, sizeof(T)).pairs);
  });
}

using Tensors = AttentionTensors;
using Gradients = AttentionGradients;
template const char* hopper_query_gradient<__nv_bfloat16>(const AttentionProblem&, const Tensors&,
                                                          const Gradients&, void*);
template const char* hopper_query_gradient<__half>(const AttentionProblem&, const Tensors&, const Gradients&,
                                                   void*);

}  // namespace shoestring::cuda
