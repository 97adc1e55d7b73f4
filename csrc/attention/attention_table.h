#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// Strides of a (batch, heads, tokens, features) tensor, in elements. Features are contiguous. For packed
/// sequences, the stride of the batch is 0.
struct HeadStrides {
  int64_t batch, head, token;
};

enum class BiasType : int8_t { kNone, kFloat, kBFloat16, kHalf, kBool };

/// Arguments of attention kernels, which compute softmax(capped(scale q k^T) + bias) v for every head and
/// sequence. The pointer of an argument that is not given is null.
struct AttentionProblem {
  // Numbers of sequences, query heads and key-value heads. heads is a multiple of kv_heads; query head h
  // reads key-value head h / (heads / kv_heads).
  int64_t batch, heads, kv_heads;
  // numbers of queries and keys per sequence; for packed sequences, their sums over all sequences
  int64_t queries, keys;
  int64_t head_dim, value_dim;

  // Offsets of packed sequences, else null: sequence s has the queries [cu_seqlens_q[s], cu_seqlens_q[s + 1])
  // and the keys [cu_seqlens_k[s], cu_seqlens_k[s + 1]). The arrays are on the device of the tensors.
  const int32_t *cu_seqlens_q, *cu_seqlens_k;

  // Query i of n sees key j of m if i + m - n - left <= j <= i + m - n + right. The last query is thus
  // aligned with the last key. kUnlimited means no limit.
  int64_t left, right;
  float scale, softcap;  // softcap 0 means that scores are not capped

  // The bias is added to the capped scores. Its shape is (batch, heads, queries, keys), with stride 0 for a
  // dimension of size 1. For packed sequences, its rows are the queries of all sequences (batch stride 0),
  // and its columns are the keys of one sequence. With the type kBool, false hides the key from the query.
  BiasType bias_type;
  const void* bias;
  int64_t bias_batch, bias_head, bias_query, bias_key;  // strides of the bias, in elements
  int64_t bias_columns;  // columns of the bias: 1, or at least the number of keys of a sequence

  // ALiBi subtracts slope * |i + m - n - j| from the score of query i of n and key j of m. The shape of
  // slopes is (heads), or (sequences, heads) with the stride slopes_batch of a sequence.
  const float* slopes;
  int64_t slopes_batch;

  // sinks (heads) gives each query one more key, whose score is the head's sink and whose value is zero.
  const float* sinks;

  // Dropout drops a probability if its 16 random bits are below `threshold`, and multiplies the remaining
  // ones by `kept`. The bits come from Philox with the key `seed` and the counter (j / 8 in two words, r,
  // kAttentionStream). Here j is the index of the key in its sequence, and r is the index of the query in the
  // flattened lse. The 16 bits start at bit 16 * (j % 8) of the 128 random bits.
  const int64_t* seed;
  uint32_t threshold;
  float kept;
};

/// Larger than the distance between any two tokens. As `left` or `right` of a window, it means no limit.
constexpr int64_t kUnlimited = int64_t{1} << 40;
constexpr uint32_t kAttentionStream = 0xa77e0000u;

/// Tensors of attention's forward. q, k, v and out are all fp32, all bf16 or all fp16. lse is contiguous:
/// (batch, heads, queries) or, for packed sequences, (heads, queries of all sequences).
struct AttentionTensors {
  const void *q, *k, *v;
  HeadStrides q_at, k_at, v_at;
  void* out;  // attention output: written by forward, read by backward
  HeadStrides out_at;
  float* lse;  // log-sum-exp of each query; -inf for a query that sees no key, whose output is 0
  // The part of the log-sum-exp that rounding to `lse` has lost, in lse's layout, or null: lse + lse_rest has
  // about twice the precision. Given if the bias has a floating-point type, whose values may be so large that
  // nothing of the logarithm of a sum of exponentials remains in lse.
  float* lse_rest;
};

/// Further tensors of attention's backward. delta, in lse's layout, is sum(grad_out * out) - grad_lse of each
/// query. The pointer of a gradient that is not wanted is null.
struct AttentionGradients {
  const void* grad_out;
  HeadStrides grad_out_at;
  const float* delta;
  void *q, *k, *v;  // gradients, with the dtype and the order of strides of q, k and v
  HeadStrides q_at, k_at, v_at;
  float* bias;  // gradient of the bias: contiguous, with the bias's shape; zero before the call
};

/// Describes a tile of attention scores (keys, columns) for the CPU kernels. A column is a query; the number
/// of columns is that of a packed panel of the GEMM's right operand. The products q k^T are multiplied by
/// `scale`.
struct AttentionPanel {
  int64_t position;  // index of the key that is at the same position as the tile's first query
  int64_t left, right;
  float scale, softcap, slope;
};

/// Destination of a tile of bf16 numbers that is the left operand of a product: AMX tiles of 16 keys and 32
/// queries. Tiles of successive keys are `stride` packed elements apart.
struct AttentionRows {
  float* to;
  int64_t stride;
};

/// CPU kernels for the steps of attention between the matrix products. `mask` (keys, columns) holds dropout's
/// factors of the probabilities, or is null.
struct AttentionTable {
  // Turns the products q k^T of a tile into scores: scales and caps them, adds the bias `added` (keys,
  // columns) unless it is null, and subtracts ALiBi's term. With `edge`, writes -inf for keys that a query
  // does not see. Then subtracts lse (columns) unless it is null. Writes the derivative of the softcap to
  // cap_slope (keys, columns) unless it is null.
  void (*adjust)(const AttentionPanel& panel, int64_t first_key, int64_t keys, const float* added, bool edge,
                 const float* lse, float* scores, float* cap_slope);
  // Replaces the numbers s of a tile by e^(scale s - highest), multiplied by `mask`. `scale` must be
  // positive. First updates each query's maximum score `highest`, and adds the unmasked exponentials to
  // `sums`. Rescales `sums` and the output `out` (lines: features, columns: queries) to the new maxima.
  // soften[1] is for 16-bit operands: the relative error of its exponential is 2^-17.
  void (*soften[2])(float* scores, int64_t keys, const float* mask, float scale, float* highest, float* sums,
                    float* out, int64_t lines);
  // Like soften[1], but writes the results to `pairs`, rounded to bf16, as a packed panel of the GEMM's right
  // operand. The depth of the panel, the keys, is padded with zeros to a multiple of 32. Null in builds
  // without bf16 instructions.
  void (*soften_pairs)(const float* scores, int64_t keys, const float* mask, float scale, float* highest,
                       float* sums, float* out, int64_t lines, float* pairs);
  // Divides the output `out` (lines: features, columns: queries) by the sums of exponentials, and writes each
  // query's log-sum-exp to lse (columns), and the part that rounding has lost to lse_rest unless it is null.
  void (*finish)(const float* highest, const float* sums, float* out, int64_t lines, float* lse,
                 float* lse_rest);
  // Replaces the numbers s of a tile by p * mask, where p is the probability exp(scale s - lse). Replaces
  // by_p, the gradients of the masked probabilities, by the gradients of the scores: p * (mask * by_p -
  // delta). differentiate[1] is for 16-bit operands, like soften[1].
  void (*differentiate[2])(float* scores, float* by_p, int64_t keys, const float* mask, float scale,
                           const float* lse, const float* delta);
  // Like differentiate[1], but rounds the results to bf16 and writes them for the products on AMX tiles:
  // p * mask to `probabilities`, and the gradients of the scores to `gradients` and to `pairs`. `pairs` has
  // the format of soften_pairs. Null in builds without bf16 instructions.
  void (*differentiate_tiles)(const float* scores, const float* by_p, int64_t keys, const float* mask,
                              float scale, const float* lse, const float* delta,
                              const AttentionRows& probabilities, const AttentionRows& gradients,
                              float* pairs);
  // Rounds a tile of fp32 numbers to bf16, and writes it to `rows` and, unless it is null, to `pairs`, like
  // differentiate_tiles.
  void (*round_tiles)(const float* from, int64_t keys, const AttentionRows& rows, float* pairs);
  // Multiplies `to` by `factors` element by element. count: number of elements, a multiple of the number of
  // columns of a panel.
  void (*multiply)(float* to, const float* factors, int64_t count);
  // Writes the dropout mask (keys, columns) to `out`: 0 or `kept`. first_row: index in the flattened lse of
  // the tile's first query.
  void (*mask)(uint64_t seed, uint32_t first_row, int64_t first_key, int64_t keys, uint32_t threshold,
               float kept, float* out);
  // Writes the dot products of the columns of two panels, a and b, over `size` rows. Adds in the same order
  // as a matrix product.
  void (*dots)(const float* a, const float* b, int64_t size, float* out);
  // The store functions multiply `count` rows of `size` elements by `scale`, convert them to fp32, bf16 or
  // fp16, and write them to `to`.
  void (*store_float)(const float* rows, int64_t stride, int64_t count, int64_t size, float scale, float* to,
                      int64_t to_stride);
  void (*store_bf16)(const float* rows, int64_t stride, int64_t count, int64_t size, float scale,
                     uint16_t* to, int64_t to_stride);
  void (*store_fp16)(const float* rows, int64_t stride, int64_t count, int64_t size, float scale,
                     uint16_t* to, int64_t to_stride);
};

/// Sizes of the attention bias. Each is 1 or the number of sequences, heads, queries or keys of the call. For
/// packed sequences, batch is 1.
struct BiasShape {
  int64_t batch, heads, queries, keys;
};

// CUDA kernels of attention. Pointers are on the device; `stream` is a cudaStream_t. Each function returns an
// error message, or null.
struct AttentionCuda {
  struct Functions {
    const char* (*forward)(const AttentionProblem& problem, const AttentionTensors& tensors, void* stream);
    // Writes delta = sum(grad_out * out) - grad_lse of each query. grad_lse has the shape of lse or is null.
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
