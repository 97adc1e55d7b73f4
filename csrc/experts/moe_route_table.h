#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// The largest number of experts. Kernels keep the scores of a token on the stack or in shared memory.
constexpr int64_t kMostExperts = 2048;

enum class RouteScore { kSoftmax, kSigmoid, kTopkSoftmax };

/// The experts of a token are the top_k with the largest keys. The key of an expert is its score plus the
/// bias. Without bias and limit of groups, the key is the logit, which has the order of the scores and is not
/// rounded. Equal keys rank by the lowest index, and NaN ranks above all numbers. With a limit of groups,
/// experts are chosen from the top_groups groups with the largest sum of their two largest keys.
///
/// With l the logits of a token, p = softmax(l) and s = sigmoid(l), the weight of a chosen expert i is scale
/// times
/// - kSoftmax: p_i, or if renormalize the softmax of the chosen logits;
/// - kSigmoid: s_i, or if renormalize s_i / (sum of the chosen s + kLeastSum);
/// - kTopkSoftmax: the softmax of the chosen logits.
///
/// Over the n tokens that count, with c_e the number of tokens of expert e, and the shares of a token P = p,
/// or P = s / sum(s) for kSigmoid, the losses are
/// - balance = experts / n^2 * sum over e of c_e * (sum over tokens of P_e);
/// - z = 1 / n * sum over tokens of log(sum(exp(l)))^2.
struct Route {
  int64_t experts, top_k, groups, top_groups;
  RouteScore score;
  bool renormalize;
  float scale;
};

constexpr float kLeastSum = 1e-20f;  // as in DeepSeek-V3

/// Rows of the forward pass. Pointers are to whole tensors of `rows` tokens. bias and mask may be null.
struct RouteForward {
  const void* logits;
  const float* bias;
  const bool* mask;
  int64_t* index;
  void* weight;
};

/// Rows of the backward pass. The logits and gradients have one dtype. grad_weight may be null.
struct RouteBackward {
  const void* logits;
  const int64_t* index;
  const void* grad_weight;
  void* grad_logits;
};

/// Sums over the tokens of a part, on the CPU: the shares and the number of tokens of each expert, and the
/// squares of the log-sum-exps.
struct RouteSums {
  double* shares;
  int64_t* counts;
  double* squares;
};

/// CPU kernels for one dtype of the logits, for the tokens [begin, end).
struct RouteRows {
  // Adds to `sums`, which start at 0.
  void (*forward)(const Route& route, const RouteForward& io, int64_t begin, int64_t end,
                  const RouteSums& sums);
  // slopes (experts), or null: the gradients of the shares of a token, the same for each token. z_slope: the
  // gradient of half the square of a log-sum-exp.
  void (*backward)(const Route& route, const RouteBackward& io, const float* slopes, float z_slope,
                   int64_t begin, int64_t end);
};

struct RouteTable {
  RouteRows of_float, of_bf16, of_fp16;
};

/// Sums over the tokens of each part, on CUDA: shares and counts (parts, experts), squares (parts).
struct RouteParts {
  int64_t parts;
  float* shares;
  int* counts;
  float* squares;
};

/// CUDA kernels. All pointers are on the device. Each function returns an error message or null.
struct RouteCuda {
  using Forward = const char* (*)(const Route& route, const RouteForward& io, int64_t rows,
                                  const RouteParts& parts, void* stream);
  // grad_balance and grad_z may be null. counts: those of the forward pass.
  using Backward = const char* (*)(const Route& route, const RouteBackward& io, const int64_t* counts,
                                   const float* grad_balance, const float* grad_z, int64_t rows,
                                   void* stream);
  Forward forward_float, forward_bf16, forward_fp16;
  Backward backward_float, backward_bf16, backward_fp16;
  // Adds up all parts: writes the counts (experts) and both losses.
  const char* (*finish)(const Route& route, const RouteParts& parts, int64_t* counts, float* balance,
                        float* z, void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::RouteTable, moe_route)
