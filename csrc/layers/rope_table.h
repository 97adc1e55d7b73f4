#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// Strides in elements. The stride of a head's elements is 1.
struct HeadStrides {
  int64_t batch, head, token;
};

// The queries or the keys of a call.
struct RopeHeads {
  int64_t heads;
  const void *x, *grad;  // grad: of the result, in backward; x is then null unless there is a weight
  void* out;             // the result; in backward, the gradient of x
  const void* weight;    // (head_dim): RMSNorm's weight, or null for no norm; fp32 on the CPU
  HeadStrides x_strides, grad_strides, out_strides;
};

struct Rope {
  RopeHeads sides[2];
  int64_t tokens, head_dim, rotary_dim;  // the first rotary_dim elements are rotated
  bool interleaved;                      // pairs are adjacent elements; false: rotary_dim / 2 apart
  // Tables of the angles. A token reads row positions[token] or, without positions, row `token` of its batch.
  // On the CPU, tables are dense fp32 with rotary_dim / 2 columns. If interleaved, they have rotary_dim
  // columns: each cosine twice, and each sine twice, first negated.
  const void *cos, *sin;
  int64_t table_rows, table_batch, table_token, table_step;  // number of rows, then strides in elements
  int table_bits;  // dtype of the tables: 32: fp32, 16: bf16, 15: fp16
  const int64_t* positions;
  int64_t position_batch, position_token;  // strides of position_ids
  float eps, offset;                       // RMSNorm adds eps to the mean of squares and offset to the weight
  bool wide_weight;                        // weights are fp32; false: x's dtype
};

struct RopeTable {
  // Rotates tokens [begin, end) of all batches.
  using Forward = void (*)(const Rope& rope, int64_t begin, int64_t end);
  // Computes the gradients of tokens [begin, end). Adds the sums of the weights' gradients to grad_weights (2
  // * head_dim), queries first, unless it is null.
  using Backward = void (*)(const Rope& rope, int64_t begin, int64_t end, float* grad_weights);
  Forward forward_float, forward_bf16, forward_fp16;
  Backward backward_float, backward_bf16, backward_fp16;
};

// CUDA kernels. Pointers are on the device; stream is a cudaStream_t. Functions return the text of an error,
// or null.
struct RopeCuda {
  using Forward = const char* (*)(const Rope& rope, int64_t batches, void* stream);
  // grad_weights is (parts, 2 * head_dim), or null. Each team of lanes writes one row of it.
  using Backward = const char* (*)(const Rope& rope, int64_t batches, int64_t parts, float* grad_weights,
                                   void* stream);
  Forward forward_float, forward_bf16, forward_fp16;
  Backward backward_float, backward_bf16, backward_fp16;
};

constexpr int64_t kMostNormedHeadDim = 1024;  // limit of the buffer for a head between its two passes

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::RopeTable, rope)
