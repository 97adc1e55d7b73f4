#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <shoestring/blocks/attention.h>
#include <shoestring/core/export.h>

namespace shoestring::nn {

/// The tokens that the block of MixtureOfDepths has computed.
struct DepthRoute {
  /// (chosen), int64: the chosen rows of x, viewed as (tokens, features), in ascending order.
  at::Tensor index;
  /// (sequences + 1), int64: the chosen rows of sequence s are index[offsets[s]] to index[offsets[s + 1] -
  /// 1].
  at::Tensor offsets;
  /// (chosen), fp32, or fp64 for fp64 inputs: the weights of the router. Differentiable.
  at::Tensor weight;
  /// The loss of the predictor, of shape (). Differentiable.
  at::Tensor loss;
};

struct MixtureOfDepthsOptions {
  explicit MixtureOfDepthsOptions(int64_t features) : features_(features) {}
  /// Size of the last dimension of the input.
  TORCH_ARG(int64_t, features);
  /// Share of the tokens of a sequence, above 0 and at most 1. Its product with the number of tokens is
  /// rounded to the nearest number, and is at least 1.
  TORCH_ARG(double, capacity) = 0.125;
  /// "linear": the weight of a token is the output of the router. "sigmoid": its sigmoid.
  TORCH_ARG(std::string, score) = "linear";
  /// "auto": the largest weights are chosen in training mode, and the predictor chooses in evaluation mode.
  /// "top_k", "predictor": one of both always.
  TORCH_ARG(std::string, choice) = "auto";
};

/// A block that computes a share of the tokens of each sequence; the others pass unchanged (Raposo et al.
/// 2024, arXiv 2404.02258). A linear router gives each token a weight r. The tokens of a sequence with the
/// largest weights are chosen, of equal ones those with the lowest index. With B the block applied to the
/// chosen tokens of the sequence, a chosen token becomes x + r (B(x) - x).
///
/// The choice of a token depends on later tokens. A generating model does not know these, so a linear layer,
/// the predictor, learns from x which tokens are chosen; add route.loss, its binary cross-entropy, to the
/// loss of the model. In evaluation mode the predictor chooses. Then no result of a causal block depends on
/// later tokens. checkpoint() keeps the choice for its second run.
///
/// The block is a module whose forward takes x, or x and an AttentionInput. Example:
///
///     shoestring::nn::MixtureOfDepths layer(shoestring::nn::GatedMLP(64, 128),
///                                           shoestring::nn::MixtureOfDepthsOptions(64).capacity(0.25));
///     const at::Tensor y = layer(x);
///     const at::Tensor loss = loss_of(y) + 0.01 * layer->route.loss;
class SHOESTRING_API MixtureOfDepthsImpl : public torch::nn::Cloneable<MixtureOfDepthsImpl> {
 public:
  /// Router and predictor have the device and dtype of the first parameter of the block.
  template <class Block>
  MixtureOfDepthsImpl(const torch::nn::ModuleHolder<Block>& block, const MixtureOfDepthsOptions& options)
      : MixtureOfDepthsImpl(
            torch::nn::AnyModule(block),
            requires(Block& b, const at::Tensor& x, const AttentionInput& input) { b.forward(x, input); },
            options) {}

  void reset() override;
  /// Initialises router and predictor, like linear layers.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// Maps x to a result of the same shape: (batch, tokens, features), or one sequence (tokens, features), or
  /// with cu_seqlens_q packed sequences. The block gets position_ids, cu_seqlens, and cos and sin without
  /// position_ids for the chosen tokens; a block without this argument ignores them. `source`, `bias` and
  /// `alibi_slopes` are not allowed.
  at::Tensor forward(const at::Tensor& x, const AttentionInput& input = {});

  MixtureOfDepthsOptions options;
  torch::nn::AnyModule block;
  at::Tensor router;                     ///< (features)
  at::Tensor predictor, predictor_bias;  ///< (features) and (1)
  DepthRoute route;                      ///< of the last forward; the second run of a checkpoint keeps it

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInput())})

 private:
  MixtureOfDepthsImpl(torch::nn::AnyModule block, bool block_takes_input,
                      const MixtureOfDepthsOptions& options);
  struct Chosen;
  std::vector<int64_t> bounds_of(const at::Tensor& x, const AttentionInput& input) const;
  at::Tensor run_block(const at::Tensor& rows, const Chosen& chosen, const AttentionInput& input);
  at::Tensor call_block(const at::Tensor& x, const AttentionInput& input);

  bool block_takes_input_;
  bool has_block_ = false;  // false until the first reset, which registers the block; a clone copies it
};
TORCH_MODULE(MixtureOfDepths);

}  // namespace shoestring::nn
