#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// Strides of a (batch, heads, tokens, features) tensor, in elements. The stride of the features is 1. If
/// packed, batch is 0.
struct HeadStrides {
  int64_t batch, head, token;
};

enum class BiasType : int8_t { kNone, kFloat, kBFloat16, kHalf, kBool };

/// softmax(capped(scale q k^T) + bias) v, for every head and sequence. The pointer of an argument that is not
/// given is null.
struct AttentionProblem {
  // heads is a multiple of kv_heads: head h reads key-value head h / (heads / kv_heads).
  int64_t batch, heads, kv_heads;
  int64_t queries, keys;  // tokens of a sequence; if packed, of all sequences
  int64_t head_dim, value_dim;

  // Only if packed: the queries of sequence s are [cu_seqlens_q[s], cu_seqlens_q[s + 1]), and its keys
  // accordingly. Both arrays are on the device of the tensors.
  const int32_t *cu_seqlens_q, *cu_seqlens_k;

  // Query i of n sees key j of m if i + m - n - left <= j <= i + m - n + right. The last query is thus
  // aligned with the last key. kUnlimited means no limit.
  int64_t left, right;
  float scale, softcap;  // softcap 0: no cap

  // The bias is added to the capped scores. Its shape is (batch, heads, queries, keys), with stride 0 for a
  // dimension of size 1. If packed, its rows are the queries of all sequences (batch stride 0), and its
  // columns are the keys of a sequence. With kBool, 0 hides a key.
  BiasType bias_type;
  const void* bias;
  int64_t bias_batch, bias_head, bias_query, bias_key;  // strides of the bias in elements
  int64_t bias_columns;  // columns of the bias: 1 or at least the number of keys

  // ALiBi subtracts slope * |i + m - n - j| from a score. slopes is (heads), or (batch, heads) with the batch
  // stride slopes_batch.
  const float* slopes;
  int64_t slopes_batch;

  // sinks (heads) adds one more key to each query. The sink is the score of this key, and its value is zero.
  const float* sinks;

  // Dropout drops a probability if its 16 random bits are below the threshold, and multiplies other
  // probabilities by `kept`. The bits for key j (of its sequence) and the query in row r of lse are those of
  // Philox with the key `seed` and the counter (j / 8 in two words, r, kAttentionStream). core/philox.h
  // numbers the bits.
  const int64_t* seed;
  uint32_t threshold;
  float kept;
};

/// Larger than any distance between tokens.
constexpr int64_t kUnlimited = int64_t{1} << 40;
constexpr uint32_t kAttentionStream = 0xa77e0000u;

/// The tensors are all fp32, all bf16 or all fp16. lse is contiguous: (batch, heads, queries) or, if packed,
/// (heads, queries of all sequences). delta has the same layout.
struct AttentionTensors {
  const void *q, *k, *v;
  HeadStrides q_at, k_at, v_at;
  void* out;  // forward writes it, backward reads it
  HeadStrides out_at;
  float* lse;  // -inf if a query sees no key; the output of that query is 0
};

/// Further arguments of backward. delta is sum(grad_out * out) - grad_lse of each query. The pointer of a
/// gradient that the caller does not want is null.
struct AttentionGradients {
  const void* grad_out;
  HeadStrides grad_out_at;
  const float* delta;
  void *q, *k, *v;  // gradients, with the dtype and the order of strides of the tensors
  HeadStrides q_at, k_at, v_at;
  float* bias;  // contiguous, in the bias's own shape; zero before the call
};

/// A tile of scores, (keys, columns). A column is a query; there are as many columns as in a panel of
/// gemm.h's b.
struct AttentionPanel {
  int64_t position;  // position of the first query among the keys
  int64_t left, right;
  float softcap, slope;
};

/// CPU kernels between the matrix products. A mask (keys, columns) holds the dropout factors of the
/// probabilities, or is null.
struct AttentionTable {
  // Caps the scores, adds `added` (keys, columns) unless it is null, and subtracts ALiBi's term. With `edge`,
  // writes -inf for keys that a query does not see. Writes the derivative of the cap to cap_slope (keys,
  // columns) unless it is null.
  void (*adjust)(const AttentionPanel& panel, int64_t first_key, int64_t keys, const float* added, bool edge,
                 float* scores, float* cap_slope);
  // Replaces scores by masked e^(scores - highest). Updates the maxima in `highest` and the sums in `sums`,
  // and rescales out (lines, columns) to the new maxima. soften[1] is for 16-bit operands; its exponential
  // has a relative error of 2^-17.
  void (*soften[2])(float* scores, int64_t keys, const float* mask, float* highest, float* sums, float* out,
                    int64_t lines);
  // Divides out (lines, columns) by sums and writes lse (columns).
  void (*finish)(const float* highest, const float* sums, float* out, int64_t lines, float* lse);
  // Replaces scores by masked probabilities, and by_p by the gradients of the scores: p (mask by_p - delta).
  // differentiate[1] is for 16-bit operands, like soften[1].
  void (*differentiate[2])(float* scores, float* by_p, int64_t keys, const float* mask, const float* lse,
                           const float* delta);
  void (*multiply)(float* to, const float* factors, int64_t count);  // count: elements of whole panels
  // Writes the dropout mask (keys, columns): 0 or `kept`. The queries are the rows of lse from first_row on.
  void (*mask)(uint64_t seed, uint32_t first_row, int64_t first_key, int64_t keys, uint32_t threshold,
               float kept, float* out);
  // Writes sum(a b) over `size` steps of the depth of two panels. Adds in the same order as a matrix product.
  void (*dots)(const float* a, const float* b, int64_t size, float* out);
  // Converts `count` rows of `size` elements to the dtype of `to`, multiplied by scale.
  void (*store_float)(const float* rows, int64_t stride, int64_t count, int64_t size, float scale, float* to,
                      int64_t to_stride);
  void (*store_bf16)(const float* rows, int64_t stride, int64_t count, int64_t size, float scale,
                     uint16_t* to, int64_t to_stride);
  void (*store_fp16)(const float* rows, int64_t stride, int64_t count, int64_t size, float scale,
                     uint16_t* to, int64_t to_stride);
};

/// The sizes of the bias, each 1 or the size of the problem. If packed, batch is 1.
struct BiasShape {
  int64_t batch, heads, queries, keys;
};

// CUDA kernels. Pointers are on the device; stream is a cudaStream_t. Functions return the text of an error,
// or null.
struct AttentionCuda {
  struct Functions {
    const char* (*forward)(const AttentionProblem& problem, const AttentionTensors& tensors, void* stream);
    // grad_lse, the gradient of lse, has the shape of lse or is null.
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
