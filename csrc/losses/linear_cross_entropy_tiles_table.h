#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// The kernels multiply packed weights of a range of classes by packed hidden states of kTileTokens tokens. A
/// tile of the product has kTileClasses classes as rows, and the tokens as columns.
constexpr int64_t kTileTokens = 32, kTileClasses = 32;

/// The logits of `classes` classes and kTileTokens tokens. They are scale * z + bias for the product z of the
/// weights and the hidden states.
struct LogitBlock {
  // Panels of kTileClasses classes in the format of the left operand of gemm_amx. They start `weight_stride`
  // elements apart, and the last one is padded with zeros.
  const float* weight;
  int64_t weight_stride;
  const float* hidden;  // a panel in the format of the right operand of gemm_amx
  int64_t depth;        // number of features, a multiple of 32; the panels are padded with zeros
  int64_t classes;
  float scale;
  const float* bias;  // shape (classes), or null
  // The target of each token, shape (kTileTokens), and the first class of the block.
  const int32_t* target;
  int32_t first_class;
};

/// Holds what is known about kTileTokens tokens; each member has the shape (kTileTokens).
struct TileStatistics {
  float* largest;    // largest logit of the classes so far; at first -FLT_MAX
  float* sum;        // sum of exp(logit - largest) over the classes so far; at first 0
  float* at_target;  // logit of the target, once its block has been seen
};

/// The gradient of a token's logits is factor * exp(logit_j - largest) - [j = target] at_target. `factor`
/// holds the division by the sum of exponentials, because a large log-sum-exp has a large rounding error.
/// Each member has the shape (kTileTokens).
struct TileUpstream {
  const float *largest, *factor, *at_target;
};

/// Points to the two operands of matrix products on AMX in which gradient() stores bf16. A null pointer
/// means that an operand is not needed. The classes from `classes` on up to whole panels get zeros.
struct TileOperands {
  // Panels of kTileClasses classes for a product over tokens. Each holds a row of kTileTokens numbers for
  // each class. The panels start `left_stride` 32-bit elements apart.
  float* left;
  int64_t left_stride;
  // A panel of kTileTokens tokens for a product over classes: for each pair of classes, the pairs of numbers
  // of all tokens.
  float* right;
  // sums (classes, 16): the gradients of all tokens are added to them, 16 sums for each class
  float* sums;
};

/// The kernels of linear_cross_entropy for CPUs with AMX. The pointers are null in builds without AVX-512.
struct LinearCrossEntropyTiles {
  // Updates the statistics of the tokens by a block.
  void (*statistics)(const LogitBlock& block, const TileStatistics& statistics);
  // Combines `parts` statistics of the same kTileTokens tokens, in the order of the parts. The rows of
  // largest and sum (parts, kTileTokens) are `stride` elements apart. The first rows become those of all
  // parts.
  void (*combine)(int64_t parts, int64_t stride, float* largest, float* sum);
  // Computes the gradient of the logits. Prefetches `bytes` bytes from `next` on into the L2 cache.
  void (*gradient)(const LogitBlock& block, const TileUpstream& upstream, const TileOperands& out,
                   const void* next, int64_t bytes);
  // Rounds the first `tokens` columns of z (columns, kTileTokens) to bf16, and writes each to its row of
  // `columns` elements. z has room for a multiple of 16 columns.
  void (*transpose)(const float* z, int64_t tokens, int64_t columns, uint16_t* const* rows);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::LinearCrossEntropyTiles, linear_cross_entropy_tiles)
