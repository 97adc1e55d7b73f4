// CUDA kernels for the gradient of attention's bias, and for delta, the sum of grad_out * out over the
// features of a query. An element of the bias is added to one or more scores; its gradient is the sum of
// their gradients. A block owns 64 x 64 elements of the bias, fewer where the bias has size 1. It iterates
// over the batches, heads and queries to which these elements are broadcast. shared_bias_gradient handles a
// bias that is broadcast to all keys. The kernel loads 64 features at a time, so one kernel serves every head
// dimension.

#include "cuda/attention/attention_backward.h"

namespace shoestring::cuda {
namespace {

constexpr int kTile = 64, kTileThreads = 128;
constexpr int kPiece = 64;  // number of features that a tile in shared memory holds at a time

struct Range {
  int first, end;
};

// Sums the columns of a tile, whose rows are queries. The sums are then in sums[j][0] and sums[j][1] of lanes
// 0 to 3 of warp 0. `shared` has 64 floats for each warp.
template <int kTiles>
__device__ void fold(float (&sums)[kTiles][4], float* shared) {
  __syncthreads();  // waits until no warp still reads the tiles in shared memory, which `shared` overwrites
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sums[j][i] + sums[j][2 + i];
      for (int offset = 4; offset < kWarp; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
      if (lane() < 4) shared[warp() * kTiles * 8 + j * 8 + lane() * 2 + i] = sum;
    }
  }
  __syncthreads();
  if (warp() != 0 || lane() >= 4) return;
  for (int j = 0; j < kTiles; ++j) {
    for (int i = 0; i < 2; ++i) {
      float sum = 0;
      for (int w = 0; w < kTileThreads / kWarp; ++w) sum += shared[w * kTiles * 8 + j * 8 + lane() * 2 + i];
      sums[j][i] = sum;
    }
  }
}

// Computes c += a b^T over all features, 64 features at a time.
template <class T>
__device__ void product(float (&c)[kTile / 8][4], unsigned char* a_tile, const T* a, int64_t a_stride,
                        int a_first, int a_end, bool a_vectors, const T* b, int64_t b_stride, int b_first,
                        int b_end, bool b_vectors, int features) {
  unsigned char* b_tile = a_tile + kTile * kPitch<T, kPiece>;
  for (int f = 0; f < features; f += kPiece) {
    __syncthreads();  // waits until no warp still reads the features that the next copy overwrites
    copy_rows<T, kPiece, kTile, kTileThreads>(a_tile, a + f, a_stride, a_first, a_end, features - f,
                                              a_vectors);
    copy_rows<T, kPiece, kTile, kTileThreads>(b_tile, b + f, b_stride, b_first, b_end, features - f,
                                              b_vectors);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    rows_times_rows<T, kPiece, kTile>(c, a_tile + warp() * 16 * kPitch<T, kPiece>, b_tile);
  }
}

template <class T>
__device__ void bias_block(const AttentionProblem& p, const AttentionTensors& t, const AttentionGradients& g,
                           const BackwardAccess& access, const kernels::BiasShape& shape) {
  // In packed tensors, the tiles of queries are numbered consecutively across all sequences.
  const bool packed = p.cu_seqlens_q != nullptr;
  const int columns = static_cast<int>((shape.keys + kTile - 1) / kTile);
  const int sequences = packed ? 1 : static_cast<int>(p.batch);
  const int tiles = static_cast<int>(packed ? p.queries / kTile + p.batch : (p.queries + kTile - 1) / kTile);
  int block = static_cast<int>(blockIdx.x);
  // Returns the range of indices over which this block iterates in a dimension of size `count`: one index if
  // the dimension is divided among the blocks, and otherwise all indices.
  const auto part = [&](bool split, int count) {
    if (!split) return Range{0, count};
    const int i = block % count;
    block /= count;
    return Range{i, i + 1};
  };
  const Range own_columns = part(true, columns), own_tiles = part(shape.queries > 1, tiles);
  const Range heads = part(shape.heads > 1, static_cast<int>(p.heads)),
              batches = part(shape.batch > 1, sequences);
  const int first_key = own_columns.first * kTile;

  float sums[kTile / 8][4] = {};
  // The first row of the bias that this block owns, and the number of rows that it owns.
  int64_t rows_at = 0, rows = shape.queries > 1 ? 0 : 1;
  for (int i = own_tiles.first; i < own_tiles.end; ++i) {
    for (int b = batches.first; b < batches.end; ++b) {
      const Place at = find_tile(p, false, packed ? i : i * sequences + b, kTile);
      if (at.tile < 0) continue;
      const int query = at.tile * kTile, last_query = min(query + kTile, at.queries) - 1;
      if (shape.queries > 1) rows_at = at.first_query + query, rows = last_query - query + 1;
      const Window window(p, at);
      const int begin = max(first_key, (query + window.low) / kTile * kTile);
      const int end = min(min(first_key + kTile, at.keys), last_query + window.high + 1);
      for (int key = begin; key < end; key += kTile) {
        for (int head = heads.first; head < heads.end; ++head) {
          const int64_t kv_head = head / (p.heads / p.kv_heads);
          const Scores scores(p, at, head, t.lse);
          const int warp_row = query + warp() * 16;
          const QueryStats stats[2] = {stats_of(t, g, scores, warp_row + lane() / 4),
                                       stats_of(t, g, scores, warp_row + lane() / 4 + 8)};
          float s[kTile / 8][4] = {}, by[kTile / 8][4] = {};
          product(s, dynamic_shared(),
                  head_of(static_cast<const T*>(t.q), t.q_at, at.sequence, head, at.first_query),
                  t.q_at.token, query, at.queries, access.q,
                  head_of(static_cast<const T*>(t.k), t.k_at, at.sequence, kv_head, at.first_key),
                  t.k_at.token, key, at.keys, access.k, static_cast<int>(p.head_dim));
          product(
              by, dynamic_shared(),
              head_of(static_cast<const T*>(g.grad_out), g.grad_out_at, at.sequence, head, at.first_query),
              g.grad_out_at.token, query, at.queries, access.grad_out,
              head_of(static_cast<const T*>(t.v), t.v_at, at.sequence, kv_head, at.first_key), t.v_at.token,
              key, at.keys, access.v, static_cast<int>(p.value_dim));
          differentiate<false, false>(scores, s, by, warp_row, key, [&](int, int e) { return stats[e / 2]; });
#pragma unroll
          for (int e = 0; e < kTile / 2; ++e) sums[e / 4][e % 4] += by[e / 4][e % 4];
        }
      }
    }
  }
  if (shape.queries == 1) fold(sums, reinterpret_cast<float*>(dynamic_shared()));
  const int64_t all_rows = shape.queries > 1 ? p.queries : 1;
  const int64_t head =
      (shape.batch > 1 ? batches.first : 0) * shape.heads + (shape.heads > 1 ? heads.first : 0);
  float* to = g.bias + (head * all_rows + rows_at) * shape.keys;
#pragma unroll
  for (int e = 0; e < kTile / 2; ++e) {
    const int r = warp() * 16 + lane() / 4 + e % 4 / 2 * 8,
              c = first_key + e / 4 * 8 + lane() % 4 * 2 + e % 2;
    if (r < rows && c < shape.keys) to[r * shape.keys + c] = sums[e / 4][e % 4];
  }
}

// Dynamic shared memory holds two tiles of 64 features: 18 KiB with 16-bit elements, 34 KiB in fp32. In
// registers, a lane holds 32 elements of each of three tiles: the sums, the scores and the gradients of the
// scores.
// Budget: 255 registers, 0 bytes shared, 40 bytes stack.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    bias_gradient(AttentionProblem p, AttentionTensors t, AttentionGradients g, BackwardAccess access,
                  kernels::BiasShape shape) {
  if constexpr (kHasMma) bias_block<T>(p, t, g, access, shape);
}

// ---- delta: the sum of grad_out * out over the features of a query

// Computes delta of 16 queries, the sums of grad_out * out, as the diagonal of the matrix grad_out out^T. In
// fp32 the arithmetic is the same, operation by operation, as in backward's product grad_out v^T. So if a
// query sees only one key, the difference of this product and delta is exactly 0.
template <class T>
__device__ void delta_block(const AttentionProblem& p, const T* out, const HeadStrides& out_at,
                            const T* grad_out, const HeadStrides& grad_out_at, const float* grad_lse,
                            float* delta) {
  const int g = lane() / 4, t = lane() % 4, dim = static_cast<int>(p.value_dim);
  const int64_t all = (p.cu_seqlens_q != nullptr ? 1 : p.batch) * p.heads * p.queries;
  const int64_t first = (int64_t{blockIdx.x} * (kTileThreads / kWarp) + warp()) * 16 + g;
  const T *outs[2], *grads[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = min(first + half * 8, all - 1);
    const int64_t query = row % p.queries, head = row / p.queries % p.heads,
                  batch = row / p.queries / p.heads;
    outs[half] = out + batch * out_at.batch + head * out_at.head + query * out_at.token;
    grads[half] = grad_out + batch * grad_out_at.batch + head * grad_out_at.head + query * grad_out_at.token;
  }
  const auto at = [&](const T* row, int column) { return column < dim ? to_float(row[column]) : 0.f; };
  float sums[2][4] = {};
  for (int k = t; k < dim + t; k += 8) {
    const Tf32Pair left[4] = {split(at(grads[0], k)), split(at(grads[1], k)), split(at(grads[0], k + 4)),
                              split(at(grads[1], k + 4))};
    mma_split(sums[0], left, at(outs[0], k), at(outs[0], k + 4));
    mma_split(sums[1], left, at(outs[1], k), at(outs[1], k + 4));
  }
  if (t != g / 2) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + half * 8;
    const float sum = g % 2 == 0 ? sums[half][2 * half] : sums[half][2 * half + 1];
    if (row < all) delta[row] = sum - (grad_lse != nullptr ? grad_lse[row] : 0.f);
  }
}

// Budget: 56 registers, 0 bytes shared, no spills.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    delta_of_queries(AttentionProblem p, const T* out, HeadStrides out_at, const T* grad_out,
                     HeadStrides grad_out_at, const float* grad_lse, float* delta) {
  if constexpr (kHasMma) delta_block(p, out, out_at, grad_out, grad_out_at, grad_lse, delta);
}

}  // namespace

template <class T>
const char* attention_delta(const AttentionProblem& p, const AttentionTensors& t, const void* grad_out,
                            const HeadStrides& grad_out_at, const float* grad_lse, float* delta,
                            void* stream) {
  const int64_t rows = (p.cu_seqlens_q != nullptr ? 1 : p.batch) * p.heads * p.queries;
  constexpr int per_block = kTileThreads / kWarp * 16;
  return launch(delta_of_queries<T>, (rows + per_block - 1) / per_block, kTileThreads, 0, stream, p,
                static_cast<const T*>(t.out), t.out_at, static_cast<const T*>(grad_out), grad_out_at,
                grad_lse, delta);
}

template <class T>
const char* attention_bias_gradient(const AttentionProblem& p, const AttentionTensors& t,
                                    const AttentionGradients& g, const kernels::BiasShape& shape,
                                    void* stream) {
  if (const char* error = refuse_gpu()) return error;
  const bool packed = p.cu_seqlens_q != nullptr;
  int64_t blocks = (shape.keys + kTile - 1) / kTile;
  if (shape.queries > 1) blocks *= packed ? p.queries / kTile + p.batch : (p.queries + kTile - 1) / kTile;
  if (shape.heads > 1) blocks *= p.heads;
  if (shape.batch > 1) blocks *= p.batch;
  return launch(bias_gradient<T>, blocks, kTileThreads, 2 * kTile * kPitch<T, kPiece>, stream, p, t, g,
                backward_access<T>(t, g), shape);
}

#define SHOESTRING_INSTANTIATE(T)                                                                        \
  template const char* attention_delta<T>(const AttentionProblem&, const AttentionTensors&, const void*, \
                                          const HeadStrides&, const float*, float*, void*);              \
  template const char* attention_bias_gradient<T>(const AttentionProblem&, const AttentionTensors&,      \
                                                  const AttentionGradients&, const kernels::BiasShape&,  \
                                                  void*);
SHOESTRING_INSTANTIATE(float)
SHOESTRING_INSTANTIATE(__nv_bfloat16)
SHOESTRING_INSTANTIATE(__half)

}  // namespace shoestring::cuda
