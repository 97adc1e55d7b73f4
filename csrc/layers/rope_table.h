#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// Strides of a (batch, heads, tokens, head_dim) tensor in elements. The elements within a head are
// contiguous.
struct HeadStrides {
  int64_t batch, head, token;
};

// The queries or the keys of a rope call.
struct RopeHeads {
  int64_t heads;
  // x: queries or keys, null in backward without a weight. grad: the gradient of the rotated x, in backward.
  const void *x, *grad;
  void* out;           // rotated x; in backward, the gradient of x
  const void* weight;  // RMSNorm's weight (head_dim), fp32 on the CPU; null without a norm
  HeadStrides x_strides, grad_strides, out_strides;
};

struct Rope {
  RopeHeads sides[2];
  int64_t tokens, head_dim, rotary_dim;  // the first rotary_dim elements of each head are rotated
  // Whether the two elements of a pair are adjacent; otherwise they are rotary_dim / 2 apart.
  bool interleaved;
  // Tables of cosines and sines. A token reads row positions[token] or, without positions, row `token` of its
  // batch. On the CPU, tables are contiguous fp32 rows with rotary_dim / 2 columns. If interleaved, they have
  // rotary_dim columns and hold each cosine twice, and each sine first negated and then unchanged.
  const void *cos, *sin;
  // number of rows of a table, and the strides of a table in elements
  int64_t table_rows, table_batch, table_token, table_step;
  int table_bits;  // dtype of the tables; 32: fp32, 16: bf16, 15: fp16
  const int64_t* positions;
  int64_t position_batch, position_token;  // strides of `positions`
  float eps, offset;                       // RMSNorm adds eps to the mean of squares and offset to the weight
  bool wide_weight;  // whether the RMSNorm weights are fp32; otherwise they have x's dtype
};

struct RopeTable {
  // Rotates the tokens [begin, end), counted over all batches.
  using Forward = void (*)(const Rope& rope, int64_t begin, int64_t end);
  // Computes the gradients for the tokens [begin, end), counted over all batches. Unless grad_weights (2 *
  // head_dim) is null, adds the gradients of q_weight and k_weight to it, q_weight first.
  using Backward = void (*)(const Rope& rope, int64_t begin, int64_t end, float* grad_weights);
  Forward forward_float, forward_bf16, forward_fp16;
  Backward backward_float, backward_bf16, backward_fp16;
};

// CUDA kernels of rope. Pointers are on the device; `stream` is a cudaStream_t. Each function returns an
// error message, or null.
struct RopeCuda {
  using Forward = const char* (*)(const Rope& rope, int64_t batches, void* stream);
  // grad_weights: (parts, 2 * head_dim), or null. Each team, a group of lanes that computes a head together,
  // writes its sums to one row.
  using Backward = const char* (*)(const Rope& rope, int64_t batches, int64_t parts, float* grad_weights,
                                   void* stream);
  Forward forward_float, forward_bf16, forward_fp16;
  Backward backward_float, backward_bf16, backward_fp16;
};

// Maximum head_dim of a rope call with a norm: the size of the buffer for a normalised head.
constexpr int64_t kMostNormedHeadDim = 1024;

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::RopeTable, rope)
