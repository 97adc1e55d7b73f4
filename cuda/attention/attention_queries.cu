// The gradient of the queries on CUDA. A block has up to 64 queries of a head, with their rows of grad_out,
// and iterates over the keys that these queries see. The next tiles of K and V are copied while the current
// ones are in use. The gradient of the scores is the left operand of the product with K. It is already in the
// registers where this product reads it.

#include "cuda/attention/attention_backward.h"

namespace shoestring::cuda {
namespace {

template <class T, int D>
__device__ void query_block(const AttentionProblem& p, const AttentionTensors& t, const AttentionGradients& g,
                            const BackwardAccess& access) {
  constexpr int rows = kRows<T, D>, threads = kThreads<T, D>, keys = kPassing<T, D>, pitch = kPitch<T, D>;
  const int heads = static_cast<int>(p.heads), units = static_cast<int>(gridDim.x) / heads;
  const int head = static_cast<int>(blockIdx.x) % heads,
            unit = units - 1 - static_cast<int>(blockIdx.x) / heads;
  const Place at = find_tile(p, false, unit, rows);
  if (at.tile < 0) return;
  const int64_t kv_head = head / (p.heads / p.kv_heads);
  const T* q = head_of(static_cast<const T*>(t.q), t.q_at, at.sequence, head, at.first_query);
  const T* grad_out =
      head_of(static_cast<const T*>(g.grad_out), g.grad_out_at, at.sequence, head, at.first_query);
  const T* k = head_of(static_cast<const T*>(t.k), t.k_at, at.sequence, kv_head, at.first_key);
  const T* v = head_of(static_cast<const T*>(t.v), t.v_at, at.sequence, kv_head, at.first_key);
  const int head_dim = static_cast<int>(p.head_dim), value_dim = static_cast<int>(p.value_dim);

  unsigned char *q_tile = dynamic_shared(), *grad_tile = q_tile + rows * pitch,
                *passing = grad_tile + rows * pitch;
  const Scores scores(p, at, head, t.lse);
  const int first = at.tile * rows, warp_row = first + warp() * 16;
  const int begin = max(0, first + scores.window.low) / 8 * 8;
  const int end = min(at.keys, min(first + rows, at.queries) + scores.window.high);
  const auto start_copies = [&](int key, int stage) {
    unsigned char* to = passing + stage * 2 * keys * pitch;
    copy_rows<T, D, keys, threads>(to, k, t.k_at.token, key, at.keys, head_dim, access.k);
    copy_rows<T, D, keys, threads>(to + keys * pitch, v, t.v_at.token, key, at.keys, value_dim, access.v);
    cp_async_commit();
  };
  if (begin < end) {
    copy_rows<T, D, rows, threads>(q_tile, q, t.q_at.token, first, at.queries, head_dim, access.q);
    copy_rows<T, D, rows, threads>(grad_tile, grad_out, g.grad_out_at.token, first, at.queries, value_dim,
                                   access.grad_out);
    start_copies(begin, 0);
  }
  const QueryStats stats[2] = {stats_of(t, g, scores, warp_row + lane() / 4),
                               stats_of(t, g, scores, warp_row + lane() / 4 + 8)};
  float by_q[D / 8][4] = {};
  for (int key = begin, stage = 0; key < end; key += keys, stage ^= 1) {
    cp_async_wait<0>();
    // waits until the copies for this step have arrived and no warp still reads the other stage
    __syncthreads();
    if (key + keys < end) start_copies(key + keys, stage ^ 1);
    const unsigned char* k_tile = passing + stage * 2 * keys * pitch;
    float s[keys / 8][4] = {}, by[keys / 8][4] = {};
    rows_times_rows<T, D, keys>(s, q_tile + warp() * 16 * pitch, k_tile);
    rows_times_rows<T, D, keys>(by, grad_tile + warp() * 16 * pitch, k_tile + keys * pitch);
    differentiate<false, true>(scores, s, by, warp_row, key, [&](int, int i) { return stats[i / 2]; });
    scores_times_rows<T, keys, D>(by_q, by, k_tile);
  }
  T* to = head_of(static_cast<T*>(g.q), g.q_at, at.sequence, head, at.first_query);
  store_rows<T, D>(to, g.q_at.token, warp_row, at.queries, head_dim, access.grad_q, by_q, {p.scale, p.scale});
}

// Dynamic shared memory takes kBackwardShared bytes: 68 KiB for 128 features of 16 bits, and at most 99 KiB.
// With D features, a lane holds D / 2 elements of the gradient. It also holds 16 scores and 16 gradients of
// scores. If a row of features has more than 256 bytes, it holds 8 of each, and above 512 bytes 4 of each.
// Budget: 255 registers, 0 bytes shared, no spills; in fp32 8 bytes stack.
template <class T, int D>
__global__ void __launch_bounds__(kThreads<T, D>, 2)
    query_gradient(AttentionProblem p, AttentionTensors t, AttentionGradients g, BackwardAccess access) {
  if constexpr (kHasMma) query_block<T, D>(p, t, g, access);
}

}  // namespace

template <class T>
const char* attention_query_gradient(const AttentionProblem& p, const AttentionTensors& t,
                                     const AttentionGradients& g, void* stream) {
  return with_features<T>(max(p.head_dim, p.value_dim), [&](auto features) {
    constexpr int D = decltype(features)::value;
    return launch(query_gradient<T, D>, tile_count(p, false, kRows<T, D>) * p.heads, kThreads<T, D>,
                  kBackwardShared<T, D>, stream, p, t, g, backward_access<T>(t, g));
  });
}

using Tensors = AttentionTensors;
using Gradients = AttentionGradients;
template const char* attention_query_gradient<float>(const AttentionProblem&, const Tensors&,
                                                     const Gradients&, void*);
template const char* attention_query_gradient<__nv_bfloat16>(const AttentionProblem&, const Tensors&,
                                                             const Gradients&, void*);
template const char* attention_query_gradient<__half>(const AttentionProblem&, const Tensors&,
                                                      const Gradients&, void*);

}  // namespace shoestring::cuda
