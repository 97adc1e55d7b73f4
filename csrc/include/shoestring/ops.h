#pragma once

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/export.h>

namespace shoestring {

/// Which build of the CPU kernels runs: "plain", "avx2" or "avx512". The environment variable SHOESTRING_CPU
/// names another one at start.
SHOESTRING_API std::string cpu_capability();

/// Switches to another build; false, and no change, where this machine does not have it. For tests and
/// comparisons.
SHOESTRING_API bool set_cpu_capability(const std::string& name);

struct CrossEntropyOptions {
  /// Those of LinearCrossEntropyOptions, below.
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
  /// The gradient takes the place of the logits, in the forward pass where the result is a scalar: whatever
  /// they are for besides has to be done before. Autograd refuses a backward pass that needs them still. Not
  /// where they have no gradient, nor where they are a leaf, or a view that autograd lets nobody change.
  TORCH_ARG(bool, inplace) = false;
};

/// Cross-entropy of logits (..., vocab) against target (...) int64: one pass over them, and nothing of their
/// size besides their gradient. Returns fp32 for 16-bit logits.
SHOESTRING_API at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                        const CrossEntropyOptions& options = {});

/// What cross_entropy makes, and for each token, in target's shape: its loss before token_weights,
/// log-sum-exp and entropy, fp32 for 16-bit input; and the likeliest class. Where a token is ignored they are
/// 0, and -1.
struct CrossEntropyStats {
  at::Tensor loss, token_loss, lse, entropy, argmax;
};

/// All but argmax are differentiable, unless the gradient of `loss` has taken the place of the logits.
SHOESTRING_API CrossEntropyStats cross_entropy_with_stats(const at::Tensor& logits, const at::Tensor& target,
                                                          const CrossEntropyOptions& options = {});

struct LinearCrossEntropyOptions {
  /// Tokens with this target count neither in the loss nor in the mean.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// "mean" (over the tokens that count), "sum" or "none".
  TORCH_ARG(std::string, reduction) = "mean";
  /// In [0, 1): the share of the target's probability that is spread over the vocabulary.
  TORCH_ARG(double, label_smoothing) = 0.0;
  /// If not 0, logits become softcap * tanh(logits / softcap).
  TORCH_ARG(double, softcap) = 0.0;
  /// What logits are multiplied by first, bias included; not 0.
  TORCH_ARG(double, logit_scale) = 1.0;
  /// z_loss * lse^2 is added to each token's loss, lse its log-sum-exp. Its mean is over the tokens, or over
  /// token_weights, whatever class_weights are.
  TORCH_ARG(double, z_loss) = 0.0;
  /// (vocab): a weight for each class, as in torch::nn::functional::cross_entropy; the mean of the
  /// cross-entropies is over the targets' weights.
  TORCH_ARG(std::optional<at::Tensor>, class_weights) = std::nullopt;
  /// target's shape: what each token's loss is multiplied by; the mean is over them. Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, token_weights) = std::nullopt;
  /// Each token predicts the next one's target; the last of a sequence does not count. Nothing is copied but
  /// targets.
  TORCH_ARG(bool, shift) = false;
  /// Below 1: only this share of the tokens that count, those of the largest losses, counts. A forward pass
  /// of its own finds them.
  TORCH_ARG(double, hard_fraction) = 1.0;
  /// Above 0: classes whose share of the logits' gradient is below it for every token of a chunk are left out
  /// of the gradients' products. On CUDA that waits for the GPU once a chunk, so a CUDA graph cannot capture
  /// it.
  TORCH_ARG(double, filter_eps) = 0.0;
  /// A LoRA'd head: low (..., rank), which is scaling * hidden lora_A^T, times the transpose of up (vocab,
  /// rank), which is lora_B, is added to the logits. Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, low) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, up) = std::nullopt;
  /// With absmax, weight is the codes of a frozen quantised one; the four are a QuantizeOptions' and
  /// quantized_linear's.
  TORCH_ARG(std::optional<at::Tensor>, absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, nested) = std::nullopt;
  TORCH_ARG(std::string, quant_type) = "nf4";
  TORCH_ARG(int64_t, block_size) = 64;
  /// fp32, weight's shape: the weight's gradient is added to it, and no other is made. In backward, which
  /// then computes the logits a second time; or in forward with grad_scale, the gradient that the loss is
  /// going to have. Not without gradients (at::NoGradGuard).
  TORCH_ARG(std::optional<at::Tensor>, weight_grad) = std::nullopt;
  TORCH_ARG(std::optional<double>, grad_scale) = std::nullopt;
  /// Bound on the chunk of logits that exists at a time, in MiB. 0 is the device's default: 64 on the CPU. On
  /// CUDA, where few large chunks are fastest: 1024 tokens, or at least 256 MiB; and with a gradient of the
  /// weight, all tokens where they are at most 2 * features, else features tokens (so 8 * vocab * features
  /// bytes with the fp32 accumulator).
  TORCH_ARG(int64_t, workspace_mb) = 0;
};

/// Cross-entropy of `hidden @ weight.T + bias` against `target`, without the (tokens, vocab) logits ever
/// existing. hidden (..., features), weight (vocab, features), target (...) int64, bias (vocab). Returns fp32
/// for 16-bit inputs.
SHOESTRING_API at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                               const at::Tensor& target,
                                               const std::optional<at::Tensor>& bias = std::nullopt,
                                               const LinearCrossEntropyOptions& options = {});

using LinearCrossEntropyStats = CrossEntropyStats;

/// All but argmax are differentiable; gradients of more than `loss` compute the logits a second time.
SHOESTRING_API LinearCrossEntropyStats linear_cross_entropy_with_stats(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const std::optional<at::Tensor>& bias = std::nullopt, const LinearCrossEntropyOptions& options = {});

struct LinearDistillationOptions {
  /// With absmax, weight is the codes of a frozen quantised one; the four are a QuantizeOptions' and
  /// quantized_linear's.
  TORCH_ARG(std::optional<at::Tensor>, absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, nested) = std::nullopt;
  TORCH_ARG(std::string, quant_type) = "nf4";
  TORCH_ARG(int64_t, block_size) = 64;
  /// The same for the teacher's weight.
  TORCH_ARG(std::optional<at::Tensor>, teacher_absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, teacher_nested) = std::nullopt;
  TORCH_ARG(std::string, teacher_quant_type) = "nf4";
  TORCH_ARG(int64_t, teacher_block_size) = 64;
  /// A student with a LoRA'd head: low (..., rank), which is scaling * hidden lora_A^T, times the transpose
  /// of up (vocab, rank), which is lora_B, is added to its logits. Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, low) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, up) = std::nullopt;
  /// int64, hidden's shape without features: tokens that have ignore_index there count neither in the loss
  /// nor in the mean.
  TORCH_ARG(std::optional<at::Tensor>, target) = std::nullopt;
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// "forward_kl": KL(teacher || student); "reverse_kl": KL(student || teacher); "jsd": with m = beta teacher
  /// + (1 - beta) student, beta KL(teacher || m) + (1 - beta) KL(student || m).
  TORCH_ARG(std::string, divergence) = "forward_kl";
  /// In (0, 1), for "jsd".
  TORCH_ARG(double, beta) = 0.5;
  /// What both logits are divided by. The loss is not multiplied by its square.
  TORCH_ARG(double, temperature) = 1.0;
  /// "mean" (over the tokens that count), "sum" or "none".
  TORCH_ARG(std::string, reduction) = "mean";
  /// Bound in MiB on the logits of both that exist at a time. 0 is the device's default.
  TORCH_ARG(int64_t, workspace_mb) = 0;
};

/// How far a student's distribution over the vocabulary is from its teacher's, without the logits of either
/// ever existing. hidden (..., features), weight (vocab, features), bias (vocab); the teacher's with features
/// of its own, and without a gradient; it may have another dtype. Returns fp32 for 16-bit inputs. Hinton's
/// loss, of targets and of a teacher, is alpha * linear_cross_entropy(...) + (1 - alpha) * T^2 *
/// linear_distillation(...) with temperature T: two calls.
SHOESTRING_API at::Tensor linear_distillation(const at::Tensor& hidden, const at::Tensor& weight,
                                              const at::Tensor& teacher_hidden,
                                              const at::Tensor& teacher_weight,
                                              const std::optional<at::Tensor>& bias = std::nullopt,
                                              const std::optional<at::Tensor>& teacher_bias = std::nullopt,
                                              const LinearDistillationOptions& options = {});

struct AttentionOptions {
  /// Each query sees keys up to its own; the last query and the last key are the same token.
  TORCH_ARG(bool, causal) = false;
  /// How many keys to the left and to the right of its own a query sees, -1 for all. Aligned in the same way.
  using Window = std::array<int64_t, 2>;
  TORCH_ARG(Window, window) = { -1, -1 };
  /// If not 0, scores become softcap * tanh(scores / softcap).
  TORCH_ARG(double, softcap) = 0.0;
  /// Default 1 / sqrt(head_dim).
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  /// Added to the scores: (batch, heads, queries, keys), any of them 1, floating-point or bool (true: seen).
  /// Packed: (heads, queries of all, keys of the longest sequence). Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  /// (heads) or (batch, heads): slope * |i - j| is subtracted from the scores. No gradient.
  TORCH_ARG(std::optional<at::Tensor>, alibi_slopes) = std::nullopt;
  /// (heads): the score of one more key, whose value is zero. Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, sinks) = std::nullopt;
  /// (sequences + 1) int32 on q's device: q, k and v are packed, (tokens of all, heads, features). The keys'
  /// are the queries' if not given.
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens_q) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens_k) = std::nullopt;
  /// Probability of dropping a probability, and the mask's seed, one int64 on q's device; without dropout
  /// there is none.
  TORCH_ARG(double, dropout_p) = 0;
  TORCH_ARG(std::optional<at::Tensor>, seed) = std::nullopt;
  /// true: the same bits in each run. Else, on CUDA, a call may go to PyTorch's cuDNN or flash operators
  /// where they can do it, whose backward adds up in any order. Not given:
  /// at::globalContext().deterministicAlgorithms().
  TORCH_ARG(std::optional<bool>, deterministic) = std::nullopt;
};

/// softmax(scale q k^T) v for every head, a block at a time, with memory linear in tokens: q (batch, heads,
/// tokens, head_dim), k and v (batch, kv heads, keys, features), of one dtype; heads is a multiple of kv
/// heads. Where a query sees nothing, the result is 0. Differentiable once by q, k, v, bias and sinks.
SHOESTRING_API at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const AttentionOptions& options = {});

struct AttentionResult {
  at::Tensor out;
  /// Log-sum-exp of the scores, the sink included: (batch, heads, tokens), packed (heads, tokens); fp32
  /// (fp64).
  at::Tensor lse;
};
/// Both are differentiable.
SHOESTRING_API AttentionResult attention_with_lse(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v, const AttentionOptions& options = {});

/// The bin, from 0 on, of each of `lengths` (sequences, int64 on the CPU), none of which gets more than
/// `capacity` tokens: first-fit decreasing, in n log n steps. For packed batches.
SHOESTRING_API at::Tensor pack_sequences(const at::Tensor& lengths, int64_t capacity);

struct QuantizeOptions {
  /// "nf4" (normal float, QLoRA), "fp4" or "int4" (a fitted scale and offset, after HQQ); where a weight is
  /// read, or a layer quantised, also "int8".
  TORCH_ARG(std::string, quant_type) = "nf4";
  /// Elements that share a scale: a power of two from 32 to 4096. Where an int8 weight is read, the length of
  /// its rows.
  TORCH_ARG(int64_t, block_size) = 64;
};

/// 4 bits an element, in blocks along x's flattened elements: packed uint8 ((numel + 1) / 2), the even
/// element in the upper bits, and absmax fp32 (blocks). x: fp32, bf16 or fp16. The bytes are bitsandbytes'.
/// Of "int4" absmax is int32, a bf16 scale in the lower and a bf16 offset in the upper half: the value is
/// (code - 8) * scale + offset.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> quantize_4bit(const at::Tensor& x,
                                                                const QuantizeOptions& options = {});

/// Double quantisation: 8 bits a scale. Returns codes uint8 (blocks) and nested fp32 (257 + blocks / 256,
/// rounded up): an offset, the 256 values by code, and a scale for every 256 codes.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> quantize_absmax(const at::Tensor& absmax);

/// A tensor of `shape` and `dtype` (fp32, bf16 or fp16) from its parts; with `nested`, absmax holds the
/// codes.
SHOESTRING_API at::Tensor dequantize_4bit(const at::Tensor& packed, const at::Tensor& absmax,
                                          at::IntArrayRef shape, at::ScalarType dtype,
                                          const std::optional<at::Tensor>& nested = std::nullopt,
                                          const QuantizeOptions& options = {});

/// Each row of x (..., columns) as int8 codes, x's shape, and its largest magnitude, absmax fp32 (...). x:
/// fp32, bf16 or fp16. The bytes are those of bitsandbytes' LLM.int8() weights. A row with a NaN or an
/// infinity dequantises to NaN.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> quantize_int8(const at::Tensor& x);
/// packed * absmax / 127 in `dtype`: fp32, bf16 or fp16.
SHOESTRING_API at::Tensor dequantize_int8(const at::Tensor& packed, const at::Tensor& absmax,
                                          at::ScalarType dtype);

/// The values that the parts of quantize_4bit or quantize_int8 stand for, into out: contiguous fp32, bf16 or
/// fp16.
SHOESTRING_API void dequantize_(const at::Tensor& out, const at::Tensor& packed, const at::Tensor& absmax,
                                const std::optional<at::Tensor>& nested = std::nullopt,
                                const QuantizeOptions& options = {});

/// self (m, n) = beta * self + alpha * mat1 (m, k) mat2 (k, n), summed in fp32, which self may be for bf16
/// and fp16 matrices: a weight's gradient into an fp32 buffer, say. Not differentiable.
SHOESTRING_API void addmm_(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2,
                           double beta = 1, double alpha = 1);

/// x as block-wise 8-bit codes (x's shape) and one fp32 scale for each 256 elements; a negative x needs the
/// signed map.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> quantize_8bit(const at::Tensor& x, bool is_signed);
SHOESTRING_API at::Tensor dequantize_8bit(const at::Tensor& codes, const at::Tensor& scale, bool is_signed);

/// x as 4-bit codes (128 bytes for each 256 elements, flat) and fp32 scales, one for each 32 elements
/// (signed) or 128; a negative x needs the signed map. With a step, rounded up or down by turns from step to
/// step, else to the nearest.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> quantize_state_4bit(
    const at::Tensor& x, bool is_signed, std::optional<int64_t> step = std::nullopt);
/// The first `numel` values, flat.
SHOESTRING_API at::Tensor dequantize_state_4bit(const at::Tensor& codes, const at::Tensor& scale,
                                                bool is_signed, int64_t numel);

/// x (..., in_features) times the transpose of a frozen quantised weight (out_features, in_features), plus
/// bias: packed and absmax of quantize_4bit (nested: of quantize_absmax), or of quantize_int8. The weight is
/// dequantised a panel of rows at a time. Gradients by x and bias.
SHOESTRING_API at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& packed,
                                           const at::Tensor& absmax, int64_t out_features,
                                           const std::optional<at::Tensor>& bias = std::nullopt,
                                           const std::optional<at::Tensor>& nested = std::nullopt,
                                           const QuantizeOptions& options = {});

/// x with each element dropped with probability p, the others divided by 1 - p. The mask is a function of
/// `seed`, one int64 on x's device, and the place: backward makes it again. Differentiable.
SHOESTRING_API at::Tensor seeded_dropout(const at::Tensor& x, const at::Tensor& seed, double p);

/// silu(gate) * up, computed in fp32 and rounded once. Keeps gate and up alone for backward.
SHOESTRING_API at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// gelu(gate) * up, computed in fp32 and rounded once; approximate "tanh" or "none". Keeps gate and up alone
/// for backward.
SHOESTRING_API at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up,
                                const std::string& approximate = "tanh");

struct RmsNormOptions {
  explicit RmsNormOptions(double eps) : eps_(eps) {}
  /// Added to the mean of squares.
  TORCH_ARG(double, eps);
  /// Added to the weight: Gemma's is 1.
  TORCH_ARG(double, offset) = 0.0;
  /// Of 16-bit input, what is rounded before the weight multiplies it: "llama", the normalised row; "gemma",
  /// nothing; "none", that row, the reciprocal root that made it, and the weight. Gradients are those of the
  /// exact function.
  TORCH_ARG(std::string, casting) = "llama";
};

/// x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in x's dtype; sums are fp32. weight
/// (features), of any floating-point dtype. Backward keeps x and a number a row.
SHOESTRING_API at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                                   const RmsNormOptions& options);
/// rms_norm of x + residual, and that sum, in one pass.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                               const at::Tensor& residual,
                                                               const std::optional<at::Tensor>& weight,
                                                               const RmsNormOptions& options);

/// (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in x's dtype, computed in fp32.
/// weight and bias (features), of any floating-point dtype. Backward keeps x and two numbers a row.
SHOESTRING_API at::Tensor layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                                     const std::optional<at::Tensor>& bias, double eps);

struct RopeOptions {
  /// How many of a head's elements are turned, the first ones; none: all.
  TORCH_ARG(std::optional<int64_t>, rotary_dim) = std::nullopt;
  /// Pairs are neighbours, else rotary_dim / 2 apart.
  TORCH_ARG(bool, interleaved) = false;
  /// (tokens) or (1 or batch, tokens) int64: the row of cos and sin (positions, width) for each token.
  TORCH_ARG(std::optional<at::Tensor>, position_ids) = std::nullopt;
  /// (head_dim): RMSNorm of each head of q and k before it is turned, times (offset + weight); both or
  /// neither.
  TORCH_ARG(std::optional<at::Tensor>, q_weight) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, k_weight) = std::nullopt;
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, offset) = 0.0;
};

/// Rotary position embedding: q and k, (batch, heads, tokens, head_dim) or (tokens, heads, head_dim), of any
/// strides, turned by the angles of each token, computed in fp32 and rounded once. cos and sin (tokens,
/// width) or (1 or batch, tokens, width), or with position_ids (positions, width); width is rotary_dim / 2,
/// or rotary_dim where each angle is there twice. Gradients by q, k and the weights; without weights backward
/// keeps neither q nor k.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k,
                                                       const at::Tensor& cos, const at::Tensor& sin,
                                                       const RopeOptions& options = {});

/// A frozen weight with an adapter, or without.
struct LoraWeight {
  LoraWeight(at::Tensor weight) : weight_(std::move(weight)) {}
  /// Dense (out_features, in_features) in x's dtype or, with absmax, the codes of a quantised weight.
  TORCH_ARG(at::Tensor, weight);
  TORCH_ARG(std::optional<at::Tensor>, absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, nested) = std::nullopt;
  TORCH_ARG(QuantizeOptions, quantize) = {};
  /// (out_features), any floating-point dtype, as are the following.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  /// (rank, in_features) and (out_features, rank): both or neither.
  TORCH_ARG(std::optional<at::Tensor>, lora_A) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, lora_B) = std::nullopt;
  /// alpha / rank, or alpha / sqrt(rank) for rsLoRA.
  TORCH_ARG(double, scaling) = 1;
  /// (out_features): multiplies the output before the bias. DoRA's magnitude over lora_weight_norm. Where an
  /// element is 0, so is its gradient.
  TORCH_ARG(std::optional<at::Tensor>, gain) = std::nullopt;
  /// (tokens, rank), without a gradient: multiplies x lora_A^T; zeros for the adapters that a token does not
  /// have, say.
  TORCH_ARG(std::optional<at::Tensor>, low_scale) = std::nullopt;
};

/// What is done to x first.
struct LoraInput {
  /// The layers read silu(gate) * x, and neither this product nor silu is kept for backward: SwiGLU's down
  /// projection.
  TORCH_ARG(std::optional<at::Tensor>, gate) = std::nullopt;
  /// Probability of dropping an element of what the matrices A read, and the mask's seed, one int64 on x's
  /// device; without dropout there is none.
  TORCH_ARG(double, dropout) = 0;
  TORCH_ARG(std::optional<at::Tensor>, seed) = std::nullopt;
};

/// `gain * (x W^T + scaling * (x lora_A^T) lora_B^T) + bias`, x (..., in_features), in x's dtype. Gradients
/// by x, gate, bias, lora_A, lora_B and gain; x is kept once.
SHOESTRING_API at::Tensor lora_linear(const at::Tensor& x, const LoraWeight& layer,
                                      const LoraInput& input = {});

/// The same for several layers that read one input, such as a query's, a key's and a value's projections: one
/// product with their matrices A, and one sum of the gradients by x.
SHOESTRING_API std::vector<at::Tensor> lora_linear_group(const at::Tensor& x,
                                                         const std::vector<LoraWeight>& layers,
                                                         const LoraInput& input = {});

/// The norms of the rows of W + scaling * lora_B lora_A (out_features), fp32 (fp64), without a temporary of
/// W's size and without gradients: what DoRA (arXiv 2402.09353) divides its magnitudes by.
SHOESTRING_API at::Tensor lora_weight_norm(const LoraWeight& layer);

}  // namespace shoestring
