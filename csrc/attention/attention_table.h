#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// Where the elements of a (batch, heads, tokens, features) tensor are; features lie side by side. Packed:
/// batch is 0.
struct HeadStrides {
  int64_t batch, head, token;
};

enum class BiasType : int8_t { kNone, kFloat, kBFloat16, kHalf, kBool };

/// softmax(scale q k^T, capped, plus bias) v, for every head and sequence. Pointers to what is not given are
/// null.
struct AttentionProblem {
  int64_t batch, heads,
      kv_heads;           // heads is a multiple of kv_heads: head h reads kv head h / (heads / kv_heads)
  int64_t queries, keys;  // tokens of a sequence; packed: of all sequences
  int64_t head_dim, value_dim;

  // Packed: sequence s has the queries [cu_seqlens_q[s], cu_seqlens_q[s + 1]), and so its keys. On the
  // tensors' device.
  const int32_t *cu_seqlens_q, *cu_seqlens_k;

  // Query i of n sees key j of m where i + m - n - left <= j <= i + m - n + right: aligned at the ends.
  // kUnlimited: all.
  int64_t left, right;
  float scale, softcap;  // softcap 0: none

  // bias is added to the capped scores; (batch, heads, queries, keys), a stride of 0 where it has size 1.
  // Packed: its rows are the queries of all sequences (batch stride 0), its columns a sequence's keys. kBool:
  // 0 hides a key.
  BiasType bias_type;
  const void* bias;
  int64_t bias_batch, bias_head, bias_query, bias_key;  // strides
  int64_t bias_columns;                                 // keys there are columns for, or 1

  // ALiBi: minus slope |i + m - n - j|. (heads), or (batch, heads) with a stride.
  const float* slopes;
  int64_t slopes_batch;

  const float* sinks;  // (heads): a score that every query has besides, and whose value is zero

  // Probabilities are dropped where 16 random bits are below the threshold, and the others multiplied by
  // kept. The bits for key j (of its sequence) of the query in row r of lse are those of Philox with the key
  // seed and the counter (j / 8 in two words, r, kAttentionStream), as core/philox.h numbers them.
  const int64_t* seed;
  uint32_t threshold;
  float kept;
};

/// Bigger than any distance of tokens.
constexpr int64_t kUnlimited = int64_t{1} << 40;
constexpr uint32_t kAttentionStream = 0xa77e0000u;

/// Numbers are fp32, bf16 or fp16, of one type. The rows of lse are (batch, heads, queries), packed (heads,
/// queries of all): contiguous, and so are delta's.
struct AttentionTensors {
  const void *q, *k, *v;
  HeadStrides q_at, k_at, v_at;
  void* out;  // backward reads it
  HeadStrides out_at;
  float* lse;  // -inf where a query sees nothing; its output is 0
};

/// What backward has besides: delta = sum(grad_out out) - grad_lse of each query. A gradient that is not
/// asked for is null.
struct AttentionGradients {
  const void* grad_out;
  HeadStrides grad_out_at;
  const float* delta;
  void *q, *k, *v;  // of the same types and strides' order as the tensors
  HeadStrides q_at, k_at, v_at;
  float* bias;  // contiguous, in the bias' own shape, zeros before
};

/// Scores of a panel of queries, those side by side: (keys, columns), with as many columns as a panel of
/// gemm.h's b.
struct AttentionPanel {
  int64_t position;  // the first query's, among the keys
  int64_t left, right;
  float softcap, slope;
};

/// Between the products. A mask, (keys, columns), is what probabilities are multiplied by, or null.
struct AttentionTable {
  // The cap; plus `added` (keys, columns) or null; minus ALiBi's; and -inf where `edge` and a query does not
  // see a key. With cap_slope (keys, columns), the cap's derivative.
  void (*adjust)(const AttentionPanel& panel, int64_t first_key, int64_t keys, const float* added, bool edge,
                 float* scores, float* cap_slope);
  // scores become masked e^(scores - highest), whose maxima and sums are brought up to date, and out (lines,
  // columns) with them. [1]: the exponential with a relative error of 2^-17, for operands of 16 bits.
  void (*soften[2])(float* scores, int64_t keys, const float* mask, float* highest, float* sums, float* out,
                    int64_t lines);
  // out (lines, columns) / sums, and lse (columns).
  void (*finish)(const float* highest, const float* sums, float* out, int64_t lines, float* lse);
  // scores become masked probabilities, by_p their gradients: p (mask by_p - delta). [1]: as above.
  void (*differentiate[2])(float* scores, float* by_p, int64_t keys, const float* mask, const float* lse,
                           const float* delta);
  void (*multiply)(float* to, const float* factors, int64_t count);  // whole panels
  // (keys, columns): 0, or `kept`; queries are the rows `first_row` on of lse.
  void (*mask)(uint64_t seed, uint32_t first_row, int64_t first_key, int64_t keys, uint32_t threshold,
               float kept, float* out);
  // sum(a b) over the depth of two panels, of `size` steps each, added up in the order in which a product
  // does it.
  void (*dots)(const float* a, const float* b, int64_t size, float* out);
  // `count` rows of `size` elements, times scale.
  void (*store_float)(const float* rows, int64_t stride, int64_t count, int64_t size, float scale, float* to,
                      int64_t to_stride);
  void (*store_bf16)(const float* rows, int64_t stride, int64_t count, int64_t size, float scale,
                     uint16_t* to, int64_t to_stride);
  void (*store_fp16)(const float* rows, int64_t stride, int64_t count, int64_t size, float scale,
                     uint16_t* to, int64_t to_stride);
};

/// The sizes of the bias, each 1 or the problem's. Packed: batch is 1.
struct BiasShape {
  int64_t batch, heads, queries, keys;
};

// Pointers are on the device; stream is a cudaStream_t. They return an error's text or null.
struct AttentionCuda {
  struct Functions {
    const char* (*forward)(const AttentionProblem& problem, const AttentionTensors& tensors, void* stream);
    // grad_lse: as lse, or null.
    const char* (*delta)(const AttentionProblem& problem, const AttentionTensors& tensors,
                         const void* grad_out, const HeadStrides& grad_out_at, const float* grad_lse,
                         float* delta, void* stream);
    const char* (*backward)(const AttentionProblem& problem, const AttentionTensors& tensors,
                            const AttentionGradients& gradients, const BiasShape& bias, void* stream);
  };
  Functions of_float, of_bf16, of_fp16;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::AttentionTable, attention)
