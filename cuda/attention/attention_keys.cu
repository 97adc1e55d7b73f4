// The gradients of keys and values on CUDA. A block has up to 64 keys of a key-value head. It iterates over
// the queries that see these keys, in every query head that uses the key-value head. So no other block adds
// to the same gradients. The tiles of scores are transposed: rows are keys, and columns are queries. The
// probabilities and the gradients of the scores are the left operands of the products with grad_out and q.
// They are already in the registers where these products read them.

#include "cuda/attention/attention_backward.h"

namespace shoestring::cuda {
namespace {

// Above 128 features, registers cannot hold the gradients of both keys and values, so a block computes one of
// the two.
template <int D>
constexpr bool kOneEach = D > 128;

template <class T, int D>
__device__ void key_block(const AttentionProblem& p, const AttentionTensors& t, const AttentionGradients& g,
                          const BackwardAccess& access) {
  constexpr int rows = kRows<T, D>, threads = kThreads<T, D>, queries = kPassing<T, D>, pitch = kPitch<T, D>;
  constexpr bool one_each = kOneEach<D>;
  int block = static_cast<int>(blockIdx.x);
  const bool does_v = g.v != nullptr && (!one_each || g.k == nullptr || block % 2 == 0);
  const bool does_k = one_each ? !does_v : g.k != nullptr;
  if (one_each && g.k != nullptr && g.v != nullptr) block /= 2;
  const int kv_heads = static_cast<int>(p.kv_heads), group = static_cast<int>(p.heads) / kv_heads;
  const int kv_head = block % kv_heads;
  const Place at = find_tile(p, true, block / kv_heads, rows);
  if (at.tile < 0) return;
  const T* k = head_of(static_cast<const T*>(t.k), t.k_at, at.sequence, kv_head, at.first_key);
  const T* v = head_of(static_cast<const T*>(t.v), t.v_at, at.sequence, kv_head, at.first_key);
  const int head_dim = static_cast<int>(p.head_dim), value_dim = static_cast<int>(p.value_dim);

  unsigned char *k_tile = dynamic_shared(), *v_tile = k_tile + rows * pitch, *passing = v_tile + rows * pitch;
  const Window window(p, at);
  const int first = at.tile * rows, warp_row = first + warp() * 16;
  const int begin = max(0, first - window.high),
            end = min(at.queries, min(first + rows, at.keys) - window.low);
  const int tiles = max(0, (end - begin + queries - 1) / queries), steps = tiles * group;
  const auto start_copies = [&](int step) {
    const int head = kv_head * group + step / tiles, query = begin + step % tiles * queries;
    const T* q = head_of(static_cast<const T*>(t.q), t.q_at, at.sequence, head, at.first_query);
    const T* grad_out =
        head_of(static_cast<const T*>(g.grad_out), g.grad_out_at, at.sequence, head, at.first_query);
    unsigned char* to = passing + step % 2 * 2 * queries * pitch;
    copy_rows<T, D, queries, threads>(to, q, t.q_at.token, query, at.queries, head_dim, access.q);
    copy_rows<T, D, queries, threads>(to + queries * pitch, grad_out, g.grad_out_at.token, query, at.queries,
                                      value_dim, access.grad_out);
    cp_async_commit();
  };
  if (steps > 0) {
    copy_rows<T, D, rows, threads>(k_tile, k, t.k_at.token, first, at.keys, head_dim, access.k);
    copy_rows<T, D, rows, threads>(v_tile, v, t.v_at.token, first, at.keys, value_dim, access.v);
    start_copies(0);
  }
  // accumulators of the gradients of v and of k, in this order; above 128 features of only one of the two
  float sums[one_each ? 1 : 2][D / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    const int query = begin + step % tiles * queries;
    const Scores scores(p, at, kv_head * group + step / tiles, t.lse);
    QueryStats stats[queries / 8][2];
#pragma unroll
    for (int e = 0; e < queries / 4; ++e) {
      stats[e / 2][e % 2] = stats_of(t, g, scores, query + e / 2 * 8 + lane() % 4 * 2 + e % 2);
    }
    cp_async_wait<0>();
    // waits until the copies for this step have arrived and no warp still reads the other stage
    __syncthreads();
    if (step + 1 < steps) start_copies(step + 1);
    const unsigned char *q_tile = passing + step % 2 * 2 * queries * pitch,
                        *grad_tile = q_tile + queries * pitch;
    float s[queries / 8][4] = {}, by[queries / 8][4] = {};
    rows_times_rows<T, D, queries>(s, k_tile + warp() * 16 * pitch, q_tile);
    if (does_k) rows_times_rows<T, D, queries>(by, v_tile + warp() * 16 * pitch, grad_tile);
    differentiate<true, true>(scores, s, by, warp_row, query, [&](int j, int i) { return stats[j][i % 2]; });
    if constexpr (one_each) {
      if (does_k) {
#pragma unroll
        for (int e = 0; e < queries / 2; ++e) s[e / 4][e % 4] = by[e / 4][e % 4];
      }
      scores_times_rows<T, queries, D>(sums[0], s, does_k ? q_tile : grad_tile);
    } else {
      if (does_v) scores_times_rows<T, queries, D>(sums[0], s, grad_tile);
      if (does_k) scores_times_rows<T, queries, D>(sums[1], by, q_tile);
    }
  }
  if (does_v) {
    const float dropout_scale = p.seed != nullptr ? p.kept : 1.f;
    T* to = head_of(static_cast<T*>(g.v), g.v_at, at.sequence, kv_head, at.first_key);
    store_rows<T, D>(to, g.v_at.token, warp_row, at.keys, value_dim, access.grad_v, sums[0],
                     {dropout_scale, dropout_scale});
  }
  if (does_k) {
    T* to = head_of(static_cast<T*>(g.k), g.k_at, at.sequence, kv_head, at.first_key);
    store_rows<T, D>(to, g.k_at.token, warp_row, at.keys, head_dim, access.grad_k, sums[one_each ? 0 : 1],
                     {p.scale, p.scale});
  }
}

// Dynamic shared memory takes kBackwardShared bytes: 68 KiB for 128 features of 16 bits, and at most 99 KiB.
// With D features, a lane holds D elements of the two gradients, or D / 2 elements of one gradient if D >
// 128. It also holds 16 scores and 16 gradients of scores. If a row of features has more than 256 bytes, it
// holds 8 of each, and above 512 bytes 4 of each.
// Budget: 255 registers, 0 bytes shared, no spills; in fp32 16 bytes stack.
template <class T, int D>
__global__ void __launch_bounds__(kThreads<T, D>)
    key_gradients(AttentionProblem p, AttentionTensors t, AttentionGradients g, BackwardAccess access) {
  if constexpr (kHasMma) key_block<T, D>(p, t, g, access);
}

}  // namespace

template <class T>
const char* attention_key_gradients(const AttentionProblem& p, const AttentionTensors& t,
                                    const AttentionGradients& g, void* stream) {
  return with_features<T>(max(p.head_dim, p.value_dim), [&](auto features) {
    constexpr int D = decltype(features)::value;
    const int64_t each = kOneEach<D> && g.k != nullptr && g.v != nullptr ? 2 : 1;
    return launch(key_gradients<T, D>, tile_count(p, true, kRows<T, D>) * p.kv_heads * each, kThreads<T, D>,
                  kBackwardShared<T, D>, stream, p, t, g, backward_access<T>(t, g));
  });
}

using Tensors = AttentionTensors;
using Gradients = AttentionGradients;
template const char* attention_key_gradients<float>(const AttentionProblem&, const Tensors&, const Gradients&,
                                                    void*);
template const char* attention_key_gradients<__nv_bfloat16>(const AttentionProblem&, const Tensors&,
                                                            const Gradients&, void*);
template const char* attention_key_gradients<__half>(const AttentionProblem&, const Tensors&,
                                                     const Gradients&, void*);

}  // namespace shoestring::cuda
