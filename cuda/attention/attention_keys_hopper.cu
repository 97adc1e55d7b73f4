// The gradients of keys and values on Hopper. A block has 128 keys of a key-value head. It iterates over the
// queries that see these keys, in every query head that uses the key-value head. The tiles of scores are
// transposed: rows are keys, and columns are queries. The probabilities and the gradients of the scores are
// the left operands of the products with grad_out and q. They stay in the registers in which they were
// computed. While one of the two computing warpgroups waits, the other one computes.

#include "cuda/attention/attention_backward.h"
#include "cuda/attention/attention_hopper.h"

namespace shoestring::cuda {
namespace {

// Tile sizes, which registers limit. With D features, a lane holds D / 2 elements of the gradient of keys and
// as many of the gradient of values. It also holds queries / 2 scores and as many gradients of scores; their
// packed 16-bit copies take half as many registers. Above 128 features, registers cannot hold both gradients,
// so a launch computes one of them. A softcap takes further registers.
template <int D, bool capped>
struct Tile {
  static constexpr int queries = D == 64 && !capped ? 96 : D == 256 || (D == 128 && capped) ? 48 : 64;
  static constexpr int stages = D <= 128 ? 3 : 2;
  using own = HopperTile<64, D>;  // tile with the keys of one warpgroup
  using passing = HopperTile<queries, D>;
  // Offsets in bytes, in dynamic shared memory, of the tiles of V, Q and grad_out. The tile of K is at offset
  // 0.
  static constexpr int v = kHopperGroups * own::bytes, q = 2 * v, grad_out = q + stages * passing::bytes;
  static constexpr int shared_bytes = kTileAlignment + grad_out + stages * passing::bytes;
};

template <class Tile>
struct Shared {
  Mbarrier own_full, landed, full[Tile::stages], empty[Tile::stages];
  QueryStats stats[Tile::stages][Tile::queries];
};

// Copies tiles of K, V, Q and grad_out to shared memory. One warp runs this function, and its lane 0 starts
// the copies.
template <class tile, bool by_keys>
__device__ void copy_tiles(const AttentionProblem& p, const AttentionTensors& t, const AttentionGradients& g,
                           const Place& at, int kv_head, const TileRange& range, const HopperMaps& maps,
                           unsigned char* tiles, Shared<tile>& shared) {
  using own = typename tile::own;
  using passing = typename tile::passing;
  const bool packed = p.cu_seqlens_q != nullptr, starts = lane() == 0;
  const int sequence = packed ? 0 : at.sequence, group = static_cast<int>(p.heads / p.kv_heads);
  if (starts && range.tiles > 0) {
    mbarrier_arrive_expect(shared.own_full, (by_keys ? 2 : 1) * kHopperGroups * own::bytes);
    for (int i = 0; i < kHopperGroups; ++i) {
      const int key = at.first_key + at.tile * kHopperRows + i * 64;
      load_tile<own>(tiles + i * own::bytes, maps.k, shared.own_full, key, kv_head, sequence);
      if constexpr (by_keys)
        load_tile<own>(tiles + tile::v + i * own::bytes, maps.v, shared.own_full, key, kv_head, sequence);
    }
  }
  for (int step = 0; step < range.tiles * group; ++step) {
    const int stage = step % tile::stages, nth = step / range.tiles, head = kv_head * group + nth;
    const int query = range.begin + step % range.tiles * tile::queries;
    unsigned char* q_tile = tiles + tile::q + stage * passing::bytes;
    unsigned char* grad_tile = tiles + tile::grad_out + stage * passing::bytes;
    const bool foreign = packed && query + tile::queries > at.queries;
    mbarrier_wait(shared.empty[stage], (step / tile::stages & 1) ^ 1);
    if (starts) {
      Mbarrier& full = foreign ? shared.landed : shared.full[stage];
      mbarrier_arrive_expect(full, 2 * passing::bytes);
      load_tile<passing>(q_tile, maps.q, full, at.first_query + query, head, sequence);
      load_tile<passing>(grad_tile, maps.grad_out, full, at.first_query + query, head, sequence);
    }
    const int64_t row = first_row(p, at, head);
    for (int i = lane(); i < tile::queries; i += kWarp)
      shared.stats[stage][i] = stats_of(t, g, row, at.queries, query + i);
    if (foreign) {   // only the last tile of each head can contain queries of another sequence
      __syncwarp();  // the other lanes wait only after lane 0 has started the copies
      mbarrier_wait(shared.landed, nth & 1);
      clear_rows<passing>(q_tile, at.queries - query);
      clear_rows<passing>(grad_tile, at.queries - query);
      async_fence();
    }
    __syncwarp();
    if (starts) {
      if (foreign) mbarrier_arrive(shared.full[stage]);
      mbarrier_arrive(shared.full[stage]);
    }
  }
}

template <class T, int D, bool by_values, bool by_keys, bool capped>
__device__ void compute_tiles(const AttentionProblem& p, const AttentionGradients& g,
                              const BackwardAccess& access, const Place& at, int kv_head,
                              const Window& window, const TileRange& range, int group, unsigned char* tiles,
                              Shared<Tile<D, capped>>& shared) {
  using tile = Tile<D, capped>;
  using passing = typename tile::passing;
  const int warp_row = at.tile * kHopperRows + group * 64 + warp() % 4 * 16;
  const uint64_t first = wgmma_operand(tiles), k = first + wgmma_bytes(group * tile::own::bytes),
                 v = k + wgmma_bytes(tile::v);
  float s[tile::queries / 8][4], by[by_keys ? tile::queries / 8 : 1][4];
  uint32_t probabilities[tile::queries / 16][4], by_scores[by_keys ? tile::queries / 16 : 1][4];
  float sums_v[by_values ? D / 8 : 1][4] = {}, sums_k[by_keys ? D / 8 : 1][4] = {};
  const float factor = (capped ? 1.f : p.scale) * kLog2e, capping = cap_factor(p);

  const auto start_scores = [&](int step) {
    const int stage = step % tile::stages;
    mbarrier_wait(shared.full[stage], step / tile::stages & 1);
    start_rows_times_rows<T, D>(s, k, first + wgmma_bytes(tile::q + stage * passing::bytes));
  };
  if (range.tiles > 0) {
    const int steps = range.tiles * static_cast<int>(p.heads / p.kv_heads);
    mbarrier_wait(shared.own_full, 0);
    start_scores(0);
    for (int step = 0;;) {
      const int stage = step % tile::stages;
      const uint64_t q = first + wgmma_bytes(tile::q + stage * passing::bytes);
      const uint64_t grad_out = q + wgmma_bytes(tile::grad_out - tile::q);
      const QueryStats* const own_stats = shared.stats[stage] + lane() % 4 * 2;
      const auto stats = [&](int j, int i) { return own_stats[j * 8 + i % 2]; };
      if constexpr (by_keys) start_rows_times_rows<T, D>(by, v, grad_out);
      wgmma_wait<by_keys ? 1 : 0>(s);
      if constexpr (capped && by_keys) {
        wgmma_wait<0>(by);
        cap_scores(s, by, capping, p.softcap, stats);
      } else if constexpr (capped) {
        cap_scores(s, capping, p.softcap);
      }
      mask_scores(s, -window.high, -window.low, at.queries, warp_row,
                  range.begin + step % range.tiles * tile::queries);
      exponentiate(s, factor, stats);
      if constexpr (by_keys) {
        wgmma_wait<0>(by);
        differentiate_softmax(s, by, capped, stats);
        pack_scores<T>(by_scores, by);
      }
      if constexpr (by_values) {
        pack_scores<T>(probabilities, s);
        start_scores_times_rows<T>(sums_v, probabilities, grad_out + wgmma_rows_together(passing::panel));
      }
      if constexpr (by_keys)
        start_scores_times_rows<T>(sums_k, by_scores, q + wgmma_rows_together(passing::panel));
      if (++step == steps) break;
      start_scores(step);
      if constexpr (by_values) wgmma_wait<1>(sums_v);
      if constexpr (by_keys) wgmma_wait<1>(sums_k);
      __syncwarp();  // waits until all lanes have read the statistics of this stage
      if (lane() == 0) mbarrier_arrive(shared.empty[stage]);
    }
    if constexpr (by_values) wgmma_wait<0>(sums_v);
    if constexpr (by_keys) wgmma_wait<0>(sums_k);
  }
  if constexpr (by_values) {
    if (g.v != nullptr) {
      T* to = head_of(static_cast<T*>(g.v), g.v_at, at.sequence, kv_head, at.first_key);
      store_rows<T, D>(to, g.v_at.token, warp_row, at.keys, static_cast<int>(p.value_dim), access.grad_v,
                       sums_v, {1.f, 1.f});
    }
  }
  if constexpr (by_keys) {
    if (g.k != nullptr) {
      T* to = head_of(static_cast<T*>(g.k), g.k_at, at.sequence, kv_head, at.first_key);
      store_rows<T, D>(to, g.k_at.token, warp_row, at.keys, static_cast<int>(p.head_dim), access.grad_k,
                       sums_k, {p.scale, p.scale});
    }
  }
}

// The registers in the budget are those at launch. Dynamic shared memory takes 105 KiB for 64 features, 161
// KiB for 96 and 128, 193 KiB for 192, and 225 KiB for 256.
// Budget: 168 registers, 2368 bytes shared, no spills.
template <class T, int D, bool by_values, bool by_keys, bool capped>
__global__ void __launch_bounds__(kHopperThreads, 1)
    key_gradients(const __grid_constant__ HopperMaps maps, AttentionProblem p, AttentionTensors t,
                  AttentionGradients g, BackwardAccess access) {
  using tile = Tile<D, capped>;
  const int kv_heads = static_cast<int>(p.kv_heads), kv_head = static_cast<int>(blockIdx.x) % kv_heads;
  const Place at = find_tile(p, true, static_cast<int>(blockIdx.x) / kv_heads, kHopperRows,
                             [](const char* text) { stop(text); });
  if (at.tile < 0) return;
  const Window window(p, at);
  // For every query head that uses the key-value head, the block iterates over this range of queries.
  const TileRange range = queries_that_see(at, window, tile::queries);

  __shared__ Shared<tile> shared;
  unsigned char* const tiles = first_tile();
  if (threadIdx.x == 0) {
    mbarrier_init(shared.own_full, 1);
    mbarrier_init(shared.landed, 1);
    for (int i = 0; i < tile::stages; ++i) {
      // each phase needs two arrivals: one for the copies and one for the statistics
      mbarrier_init(shared.full[i], 2);
      mbarrier_init(shared.empty[i], 4 * kHopperGroups);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp() < 4) {
    registers_shrink<kCopyingRegisters>();
    if (warp() == 0) copy_tiles<tile, by_keys>(p, t, g, at, kv_head, range, maps, tiles, shared);
  } else {
    registers_grow<kComputingRegisters>();
    compute_tiles<T, D, by_values, by_keys, capped>(p, g, access, at, kv_head, window, range, warp() / 4 - 1,
                                                    tiles, shared);
  }
}

template <class T, int D, bool by_values, bool by_keys, bool capped>
const char* run(const AttentionProblem& p, const AttentionTensors& t, const AttentionGradients& g,
                void* stream) {
  using tile = Tile<D, capped>;
  HopperMaps maps{};
  if (const char* error = maps.encode(p, t, g, tile::queries, 64)) return error;
  return launch(key_gradients<T, D, by_values, by_keys, capped>,
                tile_count(p, true, kHopperRows) * p.kv_heads, kHopperThreads, tile::shared_bytes, stream,
                maps, p, t, g, backward_access<T>(t, g));
}

template <class T, bool capped>
const char* run(const AttentionProblem& p, const AttentionTensors& t, const AttentionGradients& g,
                void* stream) {
  return with_hopper_features(max(p.head_dim, p.value_dim), [&](auto features) {
    constexpr int D = decltype(features)::value;
    if constexpr (D <= 128) {
      return run<T, D, true, true, capped>(p, t, g, stream);
    } else {
      const char* error = g.v != nullptr ? run<T, D, true, false, capped>(p, t, g, stream) : nullptr;
      return error == nullptr && g.k != nullptr ? run<T, D, false, true, capped>(p, t, g, stream) : error;
    }
  });
}

}  // namespace

template <class T>
const char* hopper_key_gradients(const AttentionProblem& p, const AttentionTensors& t,
                                 const AttentionGradients& g, void* stream) {
  return p.softcap > 0 ? run<T, true>(p, t, g, stream) : run<T, false>(p, t, g, stream);
}

using Tensors = AttentionTensors;
using Gradients = AttentionGradients;
template const char* hopper_key_gradients<__nv_bfloat16>(const AttentionProblem&, const Tensors&,
                                                         const Gradients&, void*);
template const char* hopper_key_gradients<__half>(const AttentionProblem&, const Tensors&, const Gradients&,
                                                  void*);

}  // namespace shoestring::cuda
