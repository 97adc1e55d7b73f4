// Forward of attention on CUDA, with the loop order of FlashAttention-2 (Dao, arXiv 2307.08691). A block has
// up to 64 queries of a head and iterates over the keys that these queries see. The probabilities stay in
// registers: the registers that receive the scores q k^T are those from which the product with V reads its
// left operand. K and V have one shared-memory buffer each. A tile of V is copied during q k^T, and the next
// tile of K during the product with V.

#include "core/cuda_tables.h"
#include "cuda/attention/attention.h"
#include "cuda/attention/attention_scores.h"
#include "cuda/attention/attention_softmax.h"

namespace shoestring::cuda {
namespace {

struct ForwardAccess {
  bool q, k, v, out;
};

// Number of keys in a tile of K or V. Above 128 features it is 32, because the accumulators of the output
// then take more registers.
template <class T, int D>
constexpr int kKeys = D > 128 ? 32 : kRows<T, D>;

template <class T, int D>
__device__ void forward_block(const AttentionProblem& p, const AttentionTensors& t,
                              const ForwardAccess& access) {
  constexpr int rows = kRows<T, D>, threads = kThreads<T, D>, keys = kKeys<T, D>, pitch = kPitch<T, D>;
  // In causal attention, the last tiles of queries see the most keys, so the blocks for these tiles start
  // first.
  const int heads = static_cast<int>(p.heads), units = static_cast<int>(gridDim.x) / heads;
  const int head = static_cast<int>(blockIdx.x) % heads,
            unit = units - 1 - static_cast<int>(blockIdx.x) / heads;
  const Place at = find_tile(p, false, unit, rows);
  if (at.tile < 0) return;
  const int64_t kv_head = head / (p.heads / p.kv_heads);
  const T* q = head_of(static_cast<const T*>(t.q), t.q_at, at.sequence, head, at.first_query);
  const T* k = head_of(static_cast<const T*>(t.k), t.k_at, at.sequence, kv_head, at.first_key);
  const T* v = head_of(static_cast<const T*>(t.v), t.v_at, at.sequence, kv_head, at.first_key);
  const int head_dim = static_cast<int>(p.head_dim), value_dim = static_cast<int>(p.value_dim);

  unsigned char *q_tile = dynamic_shared(), *k_tile = q_tile + rows * pitch, *v_tile = k_tile + keys * pitch;
  const Scores scores(p, at, head);
  const int first = at.tile * rows, warp_row = first + warp() * 16;
  // The first key is rounded down to a multiple of 8, because dropout draws bits for eight keys at once.
  const int begin = max(0, first + scores.window.low) / 8 * 8;
  const int end = min(at.keys, min(first + rows, at.queries) + scores.window.high);
  if (begin < end) {
    copy_rows<T, D, rows, threads>(q_tile, q, t.q_at.token, first, at.queries, head_dim, access.q);
    copy_rows<T, D, keys, threads>(k_tile, k, t.k_at.token, begin, at.keys, head_dim, access.k);
    cp_async_commit();
  }
  Softmax softmax(p.sinks != nullptr ? p.sinks[head] : -INFINITY, scores.special());
  float out[D / 8][4] = {};
  for (int key = begin; key < end; key += keys) {
    cp_async_wait<0>();
    __syncthreads();  // waits until the tile of K has arrived and no warp still reads the previous tile of V
    copy_rows<T, D, keys, threads>(v_tile, v, t.v_at.token, key, at.keys, value_dim, access.v);
    cp_async_commit();
    float s[keys / 8][4] = {};
    rows_times_rows<T, D, keys>(s, q_tile + warp() * 16 * pitch, k_tile);
    cp_async_wait<0>();
    __syncthreads();
    if (key + keys < end) {
      copy_rows<T, D, keys, threads>(k_tile, k, t.k_at.token, key + keys, at.keys, head_dim, access.k);
      cp_async_commit();
    }
    scores.apply<false>(s, nullptr, warp_row, key);
    float shrink[2];
    softmax.update(s, scores.factor, shrink, scores.special());
    scale_rows(out, shrink);
    if (scores.drops()) {
      const uint32_t kept = scores.kept<false, keys / 8>(warp_row, key);
#pragma unroll
      for (int e = 0; e < keys / 2; ++e) s[e / 4][e % 4] = kept >> e & 1 ? s[e / 4][e % 4] : 0.f;
    }
    scores_times_rows<T, keys, D>(out, s, v_tile);
  }

  float by[2], lse[2], rest[2];
  softmax.finish(by, lse, scores.special(), rest);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    by[r] *= scores.drops() ? p.kept : 1.f;
    const int row = warp_row + lane() / 4 + 8 * r;
    if (lane() % 4 != 0 || row >= at.queries) continue;
    t.lse[scores.row + row] = lse[r];
    if (t.lse_rest != nullptr) t.lse_rest[scores.row + row] = rest[r];
  }
  T* to = head_of(static_cast<T*>(t.out), t.out_at, at.sequence, head, at.first_query);
  store_rows<T, D>(to, t.out_at.token, warp_row, at.queries, value_dim, access.out, out, by);
}

// Dynamic shared memory holds tiles of Q, K and V. With 16-bit elements it takes 51 KiB for 128 features and
// 66 KiB for 256; in fp32, 99 KiB and 97 KiB. With D features, a lane holds D / 2 elements of the result and
// 32 scores (16 scores above 128 features) in registers.
// Budget: 255 registers, 0 bytes shared, no spills; in fp32 80 bytes stack.
template <class T, int D>
__global__ void __launch_bounds__(kThreads<T, D>, 2)
    forward(AttentionProblem p, AttentionTensors t, ForwardAccess access) {
  if constexpr (kHasMma) forward_block<T, D>(p, t, access);
}

template <class T>
const char* run_forward(const AttentionProblem& p, const AttentionTensors& t, void* stream) {
  if constexpr (sizeof(T) == 2) {
    if (hopper_serves(p, t)) return hopper_attention<T>(p, t, stream);
  }
  return with_features<T>(max(p.head_dim, p.value_dim), [&](auto features) {
    constexpr int D = decltype(features)::value, rows = kRows<T, D>;
    const ForwardAccess access{
        access_of(t.q, t.q_at, sizeof(T)).vectors, access_of(t.k, t.k_at, sizeof(T)).vectors,
        access_of(t.v, t.v_at, sizeof(T)).vectors, access_of(t.out, t.out_at, sizeof(T)).pairs};
    return launch(forward<T, D>, tile_count(p, false, rows) * p.heads, kThreads<T, D>,
                  (rows + 2 * kKeys<T, D>)*kPitch<T, D>, stream, p, t, access);
  });
}

template <class T>
const char* run_backward(const AttentionProblem& p, const AttentionTensors& t, const AttentionGradients& g,
                         const kernels::BiasShape& bias, void* stream) {
  const bool of_keys = g.k != nullptr || g.v != nullptr;
  const char* error = nullptr;
  if constexpr (sizeof(T) == 2) {
    if (hopper_serves(p, t, g)) {
      if (g.q != nullptr) error = hopper_query_gradient<T>(p, t, g, stream);
      return error == nullptr && of_keys ? hopper_key_gradients<T>(p, t, g, stream) : error;
    }
  }
  if (g.q != nullptr) error = attention_query_gradient<T>(p, t, g, stream);
  if (error == nullptr && of_keys) error = attention_key_gradients<T>(p, t, g, stream);
  if (error == nullptr && g.bias != nullptr) error = attention_bias_gradient<T>(p, t, g, bias, stream);
  return error;
}

template <class T>
constexpr kernels::AttentionCuda::Functions kFunctions{run_forward<T>, attention_delta<T>, run_backward<T>};

const kernels::AttentionCuda kTable{kFunctions<float>, kFunctions<__nv_bfloat16>, kFunctions<__half>};
const bool kProvided = (provide("attention", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
