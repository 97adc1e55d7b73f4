#pragma once

#include <functional>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/export.h>

namespace shoestring {

/// Options of each shard's share of linear_cross_entropy, the same on every shard but for tensors of its own
/// classes.
struct LinearCrossEntropyShardOptions {
  /// Tokens with this target do not count.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// If not 0, logits become softcap * tanh(logits / softcap).
  TORCH_ARG(double, softcap) = 0.0;
  /// What logits are multiplied by first, bias included; not 0.
  TORCH_ARG(double, logit_scale) = 1.0;
  /// A LoRA'd head: low (..., rank), which is scaling * hidden lora_A^T, times the transpose of up (classes
  /// here, rank), this shard's rows of lora_B, is added to the logits. Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, low) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, up) = std::nullopt;
  /// With absmax, weight is the codes of a frozen quantised one; the four are a QuantizeOptions' and
  /// quantized_linear's.
  TORCH_ARG(std::optional<at::Tensor>, absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, nested) = std::nullopt;
  TORCH_ARG(std::string, quant_type) = "nf4";
  TORCH_ARG(int64_t, block_size) = 64;
  /// fp32, weight's shape: in backward the weight's gradient is added to it, and no other is made.
  TORCH_ARG(std::optional<at::Tensor>, weight_grad) = std::nullopt;
  /// Bound on the logits that exist at a time, in MiB. 0 is the device's default.
  TORCH_ARG(int64_t, workspace_mb) = 0;
};

/// What a shard of the classes knows of each token, in target's shape, fp32 for 16-bit inputs; 0 where it is
/// ignored.
struct LinearCrossEntropyShard {
  at::Tensor lse;           // log-sum-exp of its logits of the classes here
  at::Tensor target_logit;  // the logit of its target; 0 where the target is elsewhere
};

/// One shard's part of linear_cross_entropy; the caller puts the parts together. With m the maximum of lse
/// over the shards, the log-sum-exp of all classes is m + log(sum(exp(lse - m))) over them, and a token's
/// loss is that less the sum of target_logit. Both are differentiable; the gradient of hidden is the sum of
/// what the shards have.
///
/// hidden (..., features), the same on every shard; weight (classes here, features), the classes from
/// first_class on; target (...) int64, of the whole vocabulary; bias (classes here).
SHOESTRING_API LinearCrossEntropyShard linear_cross_entropy_shard(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target, int64_t first_class,
    const std::optional<at::Tensor>& bias = std::nullopt, const LinearCrossEntropyShardOptions& options = {});

struct VocabParallelOptions {
  /// "mean" (over the tokens that count), "sum" or "none".
  TORCH_ARG(std::string, reduction) = "mean";
  /// z_loss * lse^2 is added to each token's loss, lse its log-sum-exp.
  TORCH_ARG(double, z_loss) = 0.0;
  /// target's shape: what each token's loss is multiplied by; the mean is over them. Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, token_weights) = std::nullopt;
  /// Each token predicts the next one's target; the last of a sequence does not count.
  TORCH_ARG(bool, shift) = false;
};

/// The sum, or the largest, of x over the processes, elementwise: x itself, overwritten, or another tensor.
/// Whoever calls owns the communication; over a c10d::ProcessGroup:
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

/// linear_cross_entropy with the classes split over processes, which all call it alike: two reductions in
/// forward, of one and three numbers a token, and in backward one of hidden's gradient, in fp32, and one of
/// low's where it is given. Every process gets the same loss, and has to differentiate it with the same
/// upstream gradient; it then has the whole gradient of hidden and low, and that of its own rows of weight,
/// bias and up. A target that is no process's, or several processes', is an error; on CUDA an assertion on
/// the device.
SHOESTRING_API at::Tensor vocab_parallel_linear_cross_entropy(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target, int64_t first_class,
    const AllReduce& all_reduce, const std::optional<at::Tensor>& bias = std::nullopt,
    const LinearCrossEntropyShardOptions& shard = {}, const VocabParallelOptions& options = {});

}  // namespace shoestring
