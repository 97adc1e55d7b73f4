#pragma once

// The operators of losses.

#include <cstdint>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring {

/// Options of cross_entropy. The options without a comment have the same meaning as in
/// LinearCrossEntropyOptions.
struct CrossEntropyOptions {
  TORCH_ARG(int64_t, ignore_index) = -100;
  TORCH_ARG(std::string, reduction) = "mean";
  TORCH_ARG(double, label_smoothing) = 0.0;
  TORCH_ARG(double, softcap) = 0.0;
  TORCH_ARG(double, logit_scale) = 1.0;
  TORCH_ARG(double, z_loss) = 0.0;
  TORCH_ARG(std::optional<at::Tensor>, class_weights) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, token_weights) = std::nullopt;
  TORCH_ARG(bool, shift) = false;
  TORCH_ARG(double, hard_fraction) = 1.0;
  TORCH_ARG(std::optional<at::Tensor>, target2) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, mix) = std::nullopt;

 public:
  /// Sets mix to a number for all tokens.
  CrossEntropyOptions& mix(double share) { return mix(at::scalar_tensor(share, at::kDouble)); }
  /// If true, the gradient of the logits overwrites the logits. If the loss is a scalar, the forward pass
  /// does this, so any other use of the logits must come before this call. Autograd raises an error if
  /// another backward pass still needs the logits. The logits stay unchanged if they require no gradient, are
  /// a leaf, or are a view that autograd does not allow to change in place. Logits whose classes are not
  /// contiguous in memory are copied first, and then the gradient overwrites the copy.
  TORCH_ARG(bool, inplace) = false;
  /// The dimension of the classes in the logits; target has the other dimensions. dim(1) serves logits
  /// (batch, classes, ...), as those of torch::nn::functional::cross_entropy.
  TORCH_ARG(int64_t, dim) = -1;
};

/// Computes the cross-entropy of logits (..., vocab) with target (...), int64, in one pass over the logits.
/// Allocates nothing of the size of the logits except their gradient. Returns fp32 for 16-bit logits.
SHOESTRING_API at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                        const CrossEntropyOptions& options = {});

/// The result of cross_entropy, four tensors in the shape of `target`, and a count. `token_loss` is the loss
/// of each token before token_weights. `lse` is the log-sum-exp of the token's logits, and `entropy` is the
/// entropy of their softmax. These three are fp32 for 16-bit input. `argmax` is the most likely class. For
/// ignored tokens argmax is -1, and token_loss, lse and entropy are 0. `correct`, int64 of shape (), is the
/// number of tokens whose argmax is their target. Ignored tokens do not count.
struct CrossEntropyStats {
  at::Tensor loss, token_loss, lse, entropy, argmax, correct;
};

/// Computes the loss and the statistics of each token. All results except argmax and correct are
/// differentiable. If the gradient of `loss` has overwritten the logits (option `inplace`), only `loss` is
/// differentiable.
SHOESTRING_API CrossEntropyStats cross_entropy_with_stats(const at::Tensor& logits, const at::Tensor& target,
                                                          const CrossEntropyOptions& options = {});

struct LinearCrossEntropyOptions {
  /// Tokens with this target are ignored: they count neither in the loss nor in the mean.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// Reduction of the losses of all tokens: "mean" (over the tokens that are not ignored), "sum" or "none".
  TORCH_ARG(std::string, reduction) = "mean";
  /// Label smoothing: the share of the target's probability that is spread evenly over the vocabulary, in [0,
  /// 1).
  TORCH_ARG(double, label_smoothing) = 0.0;
  /// If not 0, each logit is replaced by softcap * tanh(logit / softcap).
  TORCH_ARG(double, softcap) = 0.0;
  /// A factor for the logits, bias included, applied before softcap; not 0.
  TORCH_ARG(double, logit_scale) = 1.0;
  /// The loss of each token grows by z_loss * lse^2, where lse is the log-sum-exp of its logits. With
  /// reduction "mean", this term is averaged over the tokens, weighted by token_weights if given.
  /// class_weights do not affect this term.
  TORCH_ARG(double, z_loss) = 0.0;
  /// (vocab): one weight per class, as in torch::nn::functional::cross_entropy. The mean of the
  /// cross-entropies is weighted by the class weights of the targets.
  TORCH_ARG(std::optional<at::Tensor>, class_weights) = std::nullopt;
  /// A factor for the loss of each token, in the shape of `target`. The mean is weighted by these factors.
  /// Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, token_weights) = std::nullopt;
  /// If true, each token predicts the target of the next token, and the last token of a sequence is ignored.
  /// Copies only the targets, not hidden or logits.
  TORCH_ARG(bool, shift) = false;
  /// If below 1, only this share of the tokens counts: the tokens with the largest losses. A separate forward
  /// pass finds them.
  TORCH_ARG(double, hard_fraction) = 1.0;
  /// A second target of each token, in the shape of `target`, as mixup and cutmix need. The loss of a token
  /// is mix times its loss with `target` plus 1 - mix times its loss with target2. A part whose target is
  /// ignore_index adds nothing. In the mean a token counts by the sum of its other parts, each times the
  /// class weight of its target. The logits are computed and read as often as without target2.
  TORCH_ARG(std::optional<at::Tensor>, target2) = std::nullopt;
  /// The part of `target`, in [0, 1]: a number, or an fp32 or fp64 tensor with one element or in the shape of
  /// `target`. It has no gradient.
  TORCH_ARG(std::optional<at::Tensor>, mix) = std::nullopt;

 public:
  /// Sets mix to a number for all tokens.
  LinearCrossEntropyOptions& mix(double share) { return mix(at::scalar_tensor(share, at::kDouble)); }
  /// If above 0, the matrix products of the gradients skip some classes in each chunk of tokens. A class is
  /// skipped if the gradient of its logit, divided by the upstream gradient, is below filter_eps for every
  /// token of the chunk. On CUDA the host then waits for the GPU once per chunk, so a CUDA graph cannot
  /// capture the call.
  TORCH_ARG(double, filter_eps) = 0.0;
  /// LoRA adapter of the head: lora_hidden lora_B^T is added to the logits. lora_hidden (..., rank) is
  /// scaling * hidden lora_A^T, after dropout if any. lora_B (vocab, rank). Both are differentiable.
  TORCH_ARG(std::optional<at::Tensor>, lora_hidden) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, lora_B) = std::nullopt;
  /// If absmax is given, weight holds the codes of a frozen quantised weight. absmax, nested, quant_type and
  /// block_size are passed as in quantized_linear and QuantizeOptions.
  TORCH_ARG(std::optional<at::Tensor>, absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, nested) = std::nullopt;
  TORCH_ARG(std::string, quant_type) = "nf4";
  TORCH_ARG(int64_t, block_size) = 64;
  /// weight_grad is an fp32 buffer in the shape of weight. The gradient of the weight is added to this
  /// buffer, and no other gradient of the weight is allocated. By default the addition happens in the
  /// backward pass, which then computes the logits a second time. With upstream_grad, the gradient that the
  /// loss will receive in backward, the addition happens in the forward pass. Without upstream_grad, some
  /// input must require a gradient, so that a backward pass exists. With gradients disabled (at::NoGradGuard)
  /// nothing is added.
  TORCH_ARG(std::optional<at::Tensor>, weight_grad) = std::nullopt;
  TORCH_ARG(std::optional<double>, upstream_grad) = std::nullopt;
  /// Upper bound in MiB on the chunk of logits in memory; 0 selects the device's default. The default on the
  /// CPU is 64 MiB. On CUDA it is 256 MiB, but at least 1024 tokens in fp32 or 128 tokens in 16 bits. For
  /// 16-bit inputs whose weight needs a gradient, CUDA adds room for the logits' 16-bit gradient. That
  /// gradient covers all tokens if there are at most 2 * features tokens. Otherwise it covers max(2048,
  /// features) tokens, and an fp32 accumulator in the shape of weight is needed.
  TORCH_ARG(int64_t, workspace_mb) = 0;
};

/// Computes the cross-entropy of `hidden @ weight.T + bias` with `target` without storing the (tokens, vocab)
/// logits. hidden (..., features), weight (vocab, features), target (...) int64, bias (vocab). Returns fp32
/// for 16-bit inputs.
SHOESTRING_API at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                               const at::Tensor& target,
                                               const std::optional<at::Tensor>& bias = std::nullopt,
                                               const LinearCrossEntropyOptions& options = {});

using LinearCrossEntropyStats = CrossEntropyStats;

/// Computes the loss and the statistics of each token; see CrossEntropyStats. All results except argmax and
/// correct are differentiable. If more than `loss` receives a gradient, backward computes the logits a second
/// time.
SHOESTRING_API LinearCrossEntropyStats linear_cross_entropy_with_stats(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const std::optional<at::Tensor>& bias = std::nullopt, const LinearCrossEntropyOptions& options = {});

struct LinearDistillationOptions {
  /// If absmax is given, weight holds the codes of a frozen quantised weight. absmax, nested, quant_type and
  /// block_size are passed as in quantized_linear and QuantizeOptions.
  TORCH_ARG(std::optional<at::Tensor>, absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, nested) = std::nullopt;
  TORCH_ARG(std::string, quant_type) = "nf4";
  TORCH_ARG(int64_t, block_size) = 64;
  /// If teacher_absmax is given, the teacher's weight holds the codes of a frozen quantised weight.
  /// teacher_absmax, teacher_nested, teacher_quant_type and teacher_block_size are passed as in
  /// quantized_linear and QuantizeOptions.
  TORCH_ARG(std::optional<at::Tensor>, teacher_absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, teacher_nested) = std::nullopt;
  TORCH_ARG(std::string, teacher_quant_type) = "nf4";
  TORCH_ARG(int64_t, teacher_block_size) = 64;
  /// LoRA adapter of the student's head: lora_hidden lora_B^T is added to the student's logits. lora_hidden
  /// (..., rank) is scaling * hidden lora_A^T, after dropout if any. lora_B (vocab, rank). Both are
  /// differentiable.
  TORCH_ARG(std::optional<at::Tensor>, lora_hidden) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, lora_B) = std::nullopt;
  /// Targets, int64, in the shape of hidden without its last dimension. Tokens whose target is ignore_index
  /// count neither in the loss nor in the mean.
  TORCH_ARG(std::optional<at::Tensor>, target) = std::nullopt;
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// Divergence of the distributions of student and teacher over the vocabulary. "forward_kl" is KL(teacher
  /// || student), and "reverse_kl" is KL(student || teacher). "jsd" is beta KL(teacher || m) + (1 - beta)
  /// KL(student || m) with m = beta teacher + (1 - beta) student.
  TORCH_ARG(std::string, divergence) = "forward_kl";
  /// The weight of the teacher in the divergence "jsd", in (0, 1).
  TORCH_ARG(double, beta) = 0.5;
  /// The logits of student and teacher are divided by the temperature. The loss is not multiplied by
  /// temperature^2.
  TORCH_ARG(double, temperature) = 1.0;
  /// Reduction of the divergences of all tokens: "mean" (over the tokens that are not ignored), "sum" or
  /// "none".
  TORCH_ARG(std::string, reduction) = "mean";
  /// Upper bound in MiB on the logits of student and teacher in memory. 0 selects the device's default.
  TORCH_ARG(int64_t, workspace_mb) = 0;
};

/// Computes the divergence between a student's and a teacher's distribution over the vocabulary without
/// storing the logits of either. hidden (..., features), weight (vocab, features), bias (vocab). The
/// teacher's tensors may have another number of features and another dtype, and receive no gradient. Returns
/// fp32 for 16-bit inputs.
///
/// Hinton's loss, which combines targets and a teacher, takes two calls with temperature T: alpha *
/// linear_cross_entropy(...) + (1 - alpha) * T^2 * linear_distillation(...).
SHOESTRING_API at::Tensor linear_distillation(const at::Tensor& hidden, const at::Tensor& weight,
                                              const at::Tensor& teacher_hidden,
                                              const at::Tensor& teacher_weight,
                                              const std::optional<at::Tensor>& bias = std::nullopt,
                                              const std::optional<at::Tensor>& teacher_bias = std::nullopt,
                                              const LinearDistillationOptions& options = {});

}  // namespace shoestring
