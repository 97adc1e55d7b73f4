#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

// Strides in elements; those of a head's elements are 1.
struct HeadStrides {
  int64_t batch, head, token;
};

// Queries or keys.
struct RopeHeads {
  int64_t heads;
  const void *x, *grad;  // grad: of the result, in backward; x is then null without a weight
  void* out;             // the result; in backward the gradient by x
  const void* weight;    // (head_dim) of RMSNorm before the rotation, or null; fp32 on the CPU
  HeadStrides x_strides, grad_strides, out_strides;
};

struct Rope {
  RopeHeads sides[2];
  int64_t tokens, head_dim, rotary_dim;  // the first rotary_dim elements are turned
  bool interleaved;                      // pairs are neighbours, else rotary_dim / 2 apart
  // Row `position` of the tables, or without positions row `token` of batch `batch`. On the CPU fp32 and
  // dense, of rotary_dim / 2; if interleaved of rotary_dim, each sine twice, first negative.
  const void *cos, *sin;
  int64_t table_rows, table_batch, table_token, table_step;  // strides in elements
  int table_bits;                                            // 32; 16: bf16; 15: fp16
  const int64_t* positions;
  int64_t position_batch, position_token;  // strides
  float eps, offset;                       // of RMSNorm: added to the mean of squares, and to the weight
  bool wide_weight;                        // weights are fp32, not of x's type
};

struct RopeTable {
  // Tokens [begin, end) of all batches.
  using Forward = void (*)(const Rope& rope, int64_t begin, int64_t end);
  // The same; sums of the weights' gradients, queries' and keys', 2 * head_dim, are added to, or null.
  using Backward = void (*)(const Rope& rope, int64_t begin, int64_t end, float* grad_weights);
  Forward forward_float, forward_bf16, forward_fp16;
  Backward backward_float, backward_bf16, backward_fp16;
};

// Pointers are on the device; stream is a cudaStream_t. They return an error's text or null.
struct RopeCuda {
  using Forward = const char* (*)(const Rope& rope, int64_t batches, void* stream);
  // grad_weights: (parts, 2 * head_dim), of which each team of lanes writes one row, or null.
  using Backward = const char* (*)(const Rope& rope, int64_t batches, int64_t parts, float* grad_weights,
                                   void* stream);
  Forward forward_float, forward_bf16, forward_fp16;
  Backward backward_float, backward_bf16, backward_fp16;
};

constexpr int64_t kMostNormedHeadDim = 1024;  // what is kept of a head between its two passes

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::RopeTable, rope)
