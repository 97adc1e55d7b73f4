// Attention's forward on Hopper, after FlashAttention-3 (Shah et al., arXiv 2407.08608): nothing waits for what it could do
// beside. One warp copies tiles ahead; each warpgroup of 64 queries computes a tile's probabilities while the tensor cores
// multiply the tile before with V and, the warpgroups taking turns, the other's queries with K.

#include "attention.h"
#include "attention_scores.h"
#include "common/tensor_map.h"
#include "common/wgmma.h"

namespace shoestring::cuda {
namespace {

// Two warpgroups of queries have the registers of the one that copies. More of them (three, of 160 registers) do not hold 128
// keys' scores and probabilities beside the sums. A ring takes what shared memory has.
template <int D>
struct Tile {
  static constexpr int groups = 2, rows = 64 * groups, threads = 128 * (groups + 1);
  static constexpr int keys = D <= 128 ? 128 : 64, stages = D == 64 ? 4 : D == 192 ? 3 : 2, panels = (D + 63) / 64;
  static constexpr int q_panel = 64 * 128, kv_panel = keys * 128;  // bytes: 64 features of a warpgroup's rows, of the keys
  static constexpr int q_bytes = groups * panels * q_panel, kv_bytes = panels * kv_panel;
  static constexpr int shared_bytes = 1024 + q_bytes + 2 * stages * kv_bytes;  // and what it takes to begin at a multiple
  static constexpr int copying_registers = 40, computing_registers = 232;     // of 168 at the launch
};

struct Maps {
  TensorMap q, k, v;
};

template <int stages>
struct Barriers {
  Mbarrier q_full, v_landed, k_full[stages], k_empty[stages], v_full[stages], v_empty[stages];
};

// The keys that the block goes over, in tiles from `begin` on.
struct Range {
  int begin, tiles;
};

template <int D>
__device__ Range range_of(const Place& at, const Window& window) {
  const int first = at.tile * Tile<D>::rows, begin = max(0, first + window.low);
  const int end = min(at.keys, min(first + Tile<D>::rows, at.queries) + window.high);
  return {begin, end > begin ? (end - begin + Tile<D>::keys - 1) / Tile<D>::keys : 0};
}

// One warp; its lane 0 starts the copies.
template <int D>
__device__ void copy_tiles(const AttentionProblem& p, const Place& at, int head, const Range& range, const Maps& maps,
                           unsigned char* q_tile, unsigned char* k_tiles, unsigned char* v_tiles,
                           Barriers<Tile<D>::stages>& barriers) {
  using tile = Tile<D>;
  const bool packed = p.cu_seqlens_q != nullptr, starts = lane() == 0;
  const int sequence = packed ? 0 : at.sequence, kv_head = head / static_cast<int>(p.heads / p.kv_heads);
  const auto load = [&](const TensorMap& map, Mbarrier& full, unsigned char* to, int token) {
    mbarrier_arrive_expect(full, tile::kv_bytes);
#pragma unroll
    for (int i = 0; i < tile::panels; ++i) {
      tma_load<4>(to + i * tile::kv_panel, map, full, {i * 64, token, kv_head, sequence});
    }
  };
  if (starts && range.tiles > 0) {
    mbarrier_arrive_expect(barriers.q_full, tile::q_bytes);
    for (int i = 0; i < tile::groups * tile::panels; ++i) {
      const int query = at.first_query + at.tile * tile::rows + i / tile::panels * 64;
      tma_load<4>(q_tile + i * tile::q_panel, maps.q, barriers.q_full, {i % tile::panels * 64, query, head, sequence});
    }
  }
  for (int n = 0; n < range.tiles; ++n) {
    const int stage = n % tile::stages, parity = n / tile::stages & 1, key = range.begin + n * tile::keys;
    unsigned char* v_tile = v_tiles + stage * tile::kv_bytes;
    // What lies behind a packed sequence is another's, whose values may be infinite: zero times them is no zero.
    const bool foreign = packed && key + tile::keys > at.keys;
    if (starts) {
      mbarrier_wait(barriers.k_empty[stage], parity ^ 1);
      load(maps.k, barriers.k_full[stage], k_tiles + stage * tile::kv_bytes, at.first_key + key);
      mbarrier_wait(barriers.v_empty[stage], parity ^ 1);
      load(maps.v, foreign ? barriers.v_landed : barriers.v_full[stage], v_tile, at.first_key + key);
    }
    if (foreign) {  // the last tile
      mbarrier_wait(barriers.v_landed, 0);
      for (int i = (at.keys - key) * 8 + lane(); i < tile::keys * 8; i += kWarp) {
#pragma unroll
        for (int panel = 0; panel < tile::panels; ++panel) {
          reinterpret_cast<uint4*>(v_tile + panel * tile::kv_panel)[i] = make_uint4(0, 0, 0, 0);
        }
      }
      async_fence();
      __syncwarp();
      if (starts) mbarrier_arrive(barriers.v_full[stage]);
    }
  }
}

// The cap, by one exponential and one reciprocal: tanh x is 1 - 2 / (e^(2x) + 1), with the error of a number near 1.
// factor: what makes e^(2x) of a product a power of 2.
template <int kTiles>
__device__ void cap_scores(float (&s)[kTiles][4], float factor, float softcap) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = softcap - 2 * softcap * fast_reciprocal(fast_exp2(s[j][i] * factor) + 1);
  }
}

// -inf for keys that are not seen: a warp's 16 queries from `row` on, keys from `key` on.
template <int kTiles>
__device__ void mask_scores(float (&s)[kTiles][4], const Place& at, const Window& window, int row, int key) {
  if (key + kTiles * 8 - 1 - row <= window.high && key - (row + 15) >= window.low && key + kTiles * 8 <= at.keys) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int query = row + lane() / 4 + i / 2 * 8, first = key + lane() % 4 * 2 + i % 2;
    const int low = query + window.low - first, high = min(query + window.high, at.keys - 1) - first;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) s[j][i] = j * 8 >= low && j * 8 <= high ? s[j][i] : -INFINITY;
  }
}

template <class T, int D>
__device__ void compute_tiles(const AttentionProblem& p, const AttentionTensors& t, bool pairs, const Place& at, int head,
                              const Window& window, const Range& range, int group, const unsigned char* q_tile,
                              const unsigned char* k_tiles, const unsigned char* v_tiles,
                              Barriers<Tile<D>::stages>& barriers) {
  using tile = Tile<D>;
  const int own = at.tile * tile::rows + group * 64 + warp() % 4 * 16;
  const uint64_t q = wgmma_operand(q_tile + group * tile::panels * tile::q_panel);
  const uint64_t k = wgmma_operand(k_tiles), v = wgmma_operand(v_tiles, true, tile::kv_panel);
  float s[tile::keys / 8][4], out[D / 8][4] = {};
  uint32_t probabilities[tile::keys / 16][4];
  Softmax softmax(-INFINITY);
  const float factor = (p.softcap > 0 ? 1.f : p.scale) * kLog2e;
  const float cap_factor = 2 * kLog2e * p.scale / p.softcap;  // here: a division calls a function, and wgmma crosses none

  const auto start_scores = [&](int n) {
    mbarrier_wait(barriers.k_full[n % tile::stages], n / tile::stages & 1);
    const uint64_t b = k + (n % tile::stages * tile::kv_bytes >> 4);
    wgmma_fence(s);
#pragma unroll
    for (int i = 0; i < D; i += 16) {
      wgmma<T, false>(s, q + wgmma_step(i, false, tile::q_panel), b + wgmma_step(i, false, tile::kv_panel), i > 0);
    }
    wgmma_commit();
  };
  const auto start_sums = [&](int n) {
    mbarrier_wait(barriers.v_full[n % tile::stages], n / tile::stages & 1);
    const uint64_t b = v + (n % tile::stages * tile::kv_bytes >> 4);
    wgmma_pin(probabilities);
    wgmma_fence(out);
#pragma unroll
    for (int i = 0; i < tile::keys; i += 16) wgmma<T, true>(out, probabilities[i / 16], b + wgmma_step(i, true), true);
    wgmma_commit();
  };
  const auto soften = [&](int n, float (&shrink)[2]) {
    if (p.softcap > 0) cap_scores(s, cap_factor, p.softcap);
    mask_scores(s, at, window, own, range.begin + n * tile::keys);
    softmax.update(s, factor, shrink);
  };
  const auto keep_probabilities = [&] {
#pragma unroll
    for (int i = 0; i < tile::keys / 16; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) probabilities[i][e] = pack<T>(s[2 * i + e / 2][e % 2 * 2], s[2 * i + e / 2][e % 2 * 2 + 1]);
    }
  };
  const auto release = [&](Mbarrier& barrier) {
    if (lane() == 0) mbarrier_arrive(barrier);
  };

  if (range.tiles > 0) {
    float shrink[2];
    mbarrier_wait(barriers.q_full, 0);
    start_scores(0);
    wgmma_wait<0>(s);
    release(barriers.k_empty[0]);
    soften(0, shrink);
    keep_probabilities();
    for (int n = 1; n < range.tiles; ++n) {
      start_scores(n);
      start_sums(n - 1);
      wgmma_wait<1>(s);
      release(barriers.k_empty[n % tile::stages]);
      soften(n, shrink);
      wgmma_wait<0>(out);
      release(barriers.v_empty[(n - 1) % tile::stages]);
      scale_rows(out, shrink);
      keep_probabilities();
    }
    start_sums(range.tiles - 1);
    wgmma_wait<0>(out);
  }

  float by[2], lse[2];
  softmax.finish(by, lse);
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t before = packed ? int64_t{head} : int64_t{at.sequence} * p.heads + head;  // rows of lse
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own + lane() / 4 + 8 * r;
    if (lane() % 4 == 0 && row < at.queries) t.lse[before * p.queries + at.first_query + row] = lse[r];
  }
  T* to = head_of(static_cast<T*>(t.out), t.out_at, at.sequence, head, at.first_query);
  store_rows<T, D>(to, t.out_at.token, own, at.queries, static_cast<int>(p.value_dim), pairs, out, by);
}

// Registers are those at the launch. Dynamic shared memory: 145 KiB for 64 features, 161 for 96 and 128, 193 above.
// Budget: 168 registers, 144 bytes shared, no spills.
template <class T, int D>
__global__ void __launch_bounds__(Tile<D>::threads, 1)
    hopper_forward(const __grid_constant__ Maps maps, AttentionProblem p, AttentionTensors t, bool pairs) {
  using tile = Tile<D>;
  // The last tiles of causal sequences have the most keys: they go first.
  const int heads = static_cast<int>(p.heads), units = static_cast<int>(gridDim.x) / heads;
  const int head = static_cast<int>(blockIdx.x) % heads, unit = units - 1 - static_cast<int>(blockIdx.x) / heads;
  const Place at = find_tile(p, false, unit, tile::rows, [](const char* text) { stop(text); });
  if (at.tile < 0) return;
  const Window window(p, at);
  const Range range = range_of<D>(at, window);

  __shared__ Barriers<tile::stages> barriers;
  unsigned char* q_tile = dynamic_shared();
  q_tile += (1024 - reinterpret_cast<uintptr_t>(q_tile) % 1024) % 1024;
  unsigned char *k_tiles = q_tile + tile::q_bytes, *v_tiles = k_tiles + tile::stages * tile::kv_bytes;
  if (threadIdx.x == 0) {
    mbarrier_init(barriers.q_full, 1);
    mbarrier_init(barriers.v_landed, 1);
    for (int i = 0; i < tile::stages; ++i) {
      mbarrier_init(barriers.k_full[i], 1);
      mbarrier_init(barriers.v_full[i], 1);
      mbarrier_init(barriers.k_empty[i], 4 * tile::groups);
      mbarrier_init(barriers.v_empty[i], 4 * tile::groups);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp() < 4) {
    registers_shrink<tile::copying_registers>();
    if (warp() == 0) copy_tiles<D>(p, at, head, range, maps, q_tile, k_tiles, v_tiles, barriers);
  } else {
    registers_grow<tile::computing_registers>();
    compute_tiles<T, D>(p, t, pairs, at, head, window, range, warp() / 4 - 1, q_tile, k_tiles, v_tiles, barriers);
  }
}

// (features, tokens, heads, batch); a packed tensor has one sequence. Of dimensions of one element the stride is of no account.
const char* encode(TensorMap* map, const void* tensor, const HeadStrides& at, int64_t features, int64_t tokens, int64_t heads,
                   int64_t batch, int rows) {
  const auto bytes = [](int64_t size, int64_t stride) { return size == 1 ? 16 : stride * 2; };
  const int64_t sizes[] = {features, tokens, heads, batch};
  const int64_t strides[] = {bytes(tokens, at.token), bytes(heads, at.head), bytes(batch, at.batch)};
  const int box[] = {64, rows, 1, 1};
  return encode_tensor_map(map, tensor, 4, sizes, strides, box);
}

bool tensor_map_takes(const void* tensor, const HeadStrides& at, int64_t tokens, int64_t heads, int64_t batch) {
  const auto takes = [](int64_t size, int64_t stride) { return size == 1 || (stride > 0 && stride % 8 == 0); };
  return aligned(tensor) && takes(tokens, at.token) && takes(heads, at.head) && takes(batch, at.batch);
}

template <class T, int D>
const char* run(const AttentionProblem& p, const AttentionTensors& t, void* stream) {
  using tile = Tile<D>;
  const int64_t batch = p.cu_seqlens_q != nullptr ? 1 : p.batch;
  Maps maps;
  const char* error = encode(&maps.q, t.q, t.q_at, p.head_dim, p.queries, p.heads, batch, 64);
  if (error == nullptr) error = encode(&maps.k, t.k, t.k_at, p.head_dim, p.keys, p.kv_heads, batch, tile::keys);
  if (error == nullptr) error = encode(&maps.v, t.v, t.v_at, p.value_dim, p.keys, p.kv_heads, batch, tile::keys);
  if (error != nullptr) return error;
  return launch(hopper_forward<T, D>, tile_count(p, false, tile::rows) * p.heads, tile::threads, tile::shared_bytes, stream,
                maps, p, t, access_of(t.out, t.out_at, sizeof(T)).pairs);
}

}  // namespace

// What it lacks are options, not lengths: bias, ALiBi, sinks and dropout.
bool hopper_serves(const AttentionProblem& p, const AttentionTensors& t) {
  const int64_t batch = p.cu_seqlens_q != nullptr ? 1 : p.batch;
  int capability = 0;
  return compute_capability(capability) == nullptr && capability == 90 && p.head_dim <= 256 && p.value_dim <= 256 &&
         p.bias == nullptr && p.slopes == nullptr && p.sinks == nullptr && p.seed == nullptr && p.scale > 0 && p.keys > 0 &&
         tensor_map_takes(t.q, t.q_at, p.queries, p.heads, batch) && tensor_map_takes(t.k, t.k_at, p.keys, p.kv_heads, batch) &&
         tensor_map_takes(t.v, t.v_at, p.keys, p.kv_heads, batch);
}

template <class T>
const char* hopper_attention(const AttentionProblem& p, const AttentionTensors& t, void* stream) {
  const int64_t features = max(p.head_dim, p.value_dim);
  if (features <= 64) return run<T, 64>(p, t, stream);
  if (features <= 96) return run<T, 96>(p, t, stream);
  if (features <= 128) return run<T, 128>(p, t, stream);
  return features <= 192 ? run<T, 192>(p, t, stream) : run<T, 256>(p, t, stream);
}
template const char* hopper_attention<__nv_bfloat16>(const AttentionProblem&, const AttentionTensors&, void*);
template const char* hopper_attention<__half>(const AttentionProblem&, const AttentionTensors&, void*);

}  // namespace shoestring::cuda
