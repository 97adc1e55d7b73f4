#pragma once

// linear_cross_entropy with the classes of the vocabulary split over several devices or processes.

#include <functional>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring {

/// Options of linear_cross_entropy_shard. All shards use the same values, except for the tensors that belong
/// to the shard's own classes.
struct LinearCrossEntropyShardOptions {
  /// Tokens with this target are ignored: they add nothing to the loss.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// If not 0, logits become softcap * tanh(logits / softcap).
  TORCH_ARG(double, softcap) = 0.0;
  /// Factor for the logits, applied after the bias and before softcap; not 0.
  TORCH_ARG(double, logit_scale) = 1.0;
  /// LoRA on the output head: lora_hidden lora_B^T is added to the logits. lora_hidden (..., rank) is scaling
  /// * hidden lora_A^T, after dropout if any. lora_B (classes of this shard, rank) holds this shard's rows.
  /// Both are differentiable.
  TORCH_ARG(std::optional<at::Tensor>, lora_hidden) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, lora_B) = std::nullopt;
  /// If absmax is given, `weight` holds the codes of a frozen quantised weight. absmax, nested, quant_type
  /// and block_size have the meaning that they have in QuantizeOptions and quantized_linear.
  TORCH_ARG(std::optional<at::Tensor>, absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, nested) = std::nullopt;
  TORCH_ARG(std::string, quant_type) = "nf4";
  TORCH_ARG(int64_t, block_size) = 64;
  /// fp32 tensor with the shape of weight. Backward adds the gradient of weight to this tensor and returns no
  /// other gradient of weight.
  TORCH_ARG(std::optional<at::Tensor>, weight_grad) = std::nullopt;
  /// Upper bound on the logits that exist at a time, in MiB. 0 selects the device's default.
  TORCH_ARG(int64_t, workspace_mb) = 0;
};

/// Result of one shard for each token. lse and target_logit have the shape of target (fp32 for 16-bit
/// inputs), and are 0 at ignored tokens.
struct LinearCrossEntropyShard {
  at::Tensor lse;           ///< log-sum-exp of the token's logits over this shard's classes
  at::Tensor target_logit;  ///< logit of the token's target; 0 if another shard has the target
};

/// Computes one shard's part of linear_cross_entropy; the caller combines the parts of all shards. Let m be
/// the maximum of lse over the shards. The log-sum-exp over all classes is m + log(sum over shards of exp(lse
/// - m)). The loss of a token is this log-sum-exp minus the sum of target_logit over the shards. lse and
/// target_logit are differentiable. The gradient of hidden is the sum of the shards' gradients of hidden.
///
/// hidden (..., features) is the same on every shard. weight (classes of this shard, features) holds the
/// classes from first_class on. target (...) is int64 and counts classes of the whole vocabulary. bias has
/// shape (classes of this shard).
SHOESTRING_API LinearCrossEntropyShard linear_cross_entropy_shard(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target, int64_t first_class,
    const std::optional<at::Tensor>& bias = std::nullopt, const LinearCrossEntropyShardOptions& options = {});

/// Options of vocab_parallel_linear_cross_entropy that concern the loss as a whole.
struct VocabParallelOptions {
  /// Reduction of the losses of all tokens: "mean" (over the tokens that are not ignored), "sum" or "none".
  TORCH_ARG(std::string, reduction) = "mean";
  /// Adds z_loss * lse^2 to each token's loss, where lse is the token's log-sum-exp over all classes.
  TORCH_ARG(double, z_loss) = 0.0;
  /// Weight of each token's loss, in target's shape; "mean" divides by the sum of the weights.
  /// Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, token_weights) = std::nullopt;
  /// Compares each token's logits with the target of the next token. The last token of a sequence is ignored.
  TORCH_ARG(bool, shift) = false;
};

/// Function that reduces x elementwise over the processes, by sum or by maximum. It returns the result in x
/// or in another tensor. The caller of vocab_parallel_linear_cross_entropy provides this function. Example
/// with a c10d::ProcessGroup:
///
///     [group](at::Tensor x, shoestring::Reduce reduce) {
///       std::vector<at::Tensor> all{x};
///       c10d::AllreduceOptions options;
///       options.reduceOp = reduce == shoestring::Reduce::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
///       group->allreduce(all, options)->wait();
///       return x;
///     }
enum class Reduce { kSum, kMax };
using AllReduce = std::function<at::Tensor(at::Tensor x, Reduce reduce)>;

/// Computes linear_cross_entropy with the classes split over processes. All processes must pass the same
/// arguments, apart from first_class and the tensors of their own classes.
///
/// Communication: forward makes two reductions, of one and of three numbers per token. Backward reduces the
/// fp32 gradient of hidden, and the gradient of `lora_hidden` if it is given.
///
/// Every process gets the same loss, and must differentiate it with the same upstream gradient. After
/// backward, every process has the complete gradients of hidden and lora_hidden, and the gradients of its own
/// rows of weight, bias and lora_B. A target that belongs to no process, or to several, is an error (on an
/// accelerator, an assertion on the device).
SHOESTRING_API at::Tensor vocab_parallel_linear_cross_entropy(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target, int64_t first_class,
    const AllReduce& all_reduce, const std::optional<at::Tensor>& bias = std::nullopt,
    const LinearCrossEntropyShardOptions& shard = {}, const VocabParallelOptions& options = {});

}  // namespace shoestring
