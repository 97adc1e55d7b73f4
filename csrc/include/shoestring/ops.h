#pragma once

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/arg.h>

#include <shoestring/export.h>

namespace shoestring {

/// Returns the CPU kernels in use: "plain", "avx2", "avx512" or "amx". "amx" means those for AVX-512, and
/// AMX tiles for products of bf16 matrices. The default is the best that this machine supports. The
/// environment variable SHOESTRING_CPU selects another one when the library is loaded.
SHOESTRING_API std::string cpu_capability();

/// Selects other CPU kernels, for tests and comparisons. Returns false and changes nothing if this machine
/// does not support the kernels `name`.
SHOESTRING_API bool set_cpu_capability(const std::string& name);

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

struct AttentionOptions {
  /// If true, a query attends only to keys up to its own position. The last query is aligned with the last
  /// key.
  TORCH_ARG(bool, causal) = false;
  /// How many keys to the left and to the right of its own position a query attends to; -1 means all. The
  /// last query is aligned with the last key.
  using WindowSize = std::array<int64_t, 2>;
  TORCH_ARG(WindowSize, window_size) = { -1, -1 };
  /// If not 0, each score is replaced by softcap * tanh(score / softcap).
  TORCH_ARG(double, softcap) = 0.0;
  /// Factor for q k^T. The default is 1 / sqrt(head_dim).
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  /// A tensor that is added to the scores, (batch, heads, queries, keys), where each size may be 1, and
  /// leading dimensions may be missing. It is floating-point, or bool with true for a key that is visible.
  /// For packed sequences: (heads, queries of all sequences, keys of the longest sequence). Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  /// (heads), (batch, heads) or, for packed sequences, (sequences, heads): slope * |i - j| is subtracted from
  /// the score of query i and key j. Receives no gradient.
  TORCH_ARG(std::optional<at::Tensor>, alibi_slopes) = std::nullopt;
  /// (heads): attention sinks. A sink is the score of an additional key of its head, and the value of this
  /// key is zero. Differentiable.
  TORCH_ARG(std::optional<at::Tensor>, sinks) = std::nullopt;
  /// (sequences + 1) int32 offsets on q's device. If given, q, k and v are packed: (tokens of all sequences,
  /// heads, features). cu_seqlens_k defaults to cu_seqlens_q.
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens_q) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens_k) = std::nullopt;
  /// dropout_p is the probability of dropping an attention probability. seed, one int64 on q's device, is the
  /// seed of the dropout mask. seed is only given with dropout.
  TORCH_ARG(double, dropout_p) = 0;
  TORCH_ARG(std::optional<at::Tensor>, seed) = std::nullopt;
  /// If true, every run gives the same bits. If false, a call on CUDA may use PyTorch's cuDNN or flash
  /// attention operators, whose backward sums in no fixed order. The default is
  /// at::globalContext().deterministicAlgorithms().
  TORCH_ARG(std::optional<bool>, deterministic) = std::nullopt;
};

/// Computes softmax(scale q k^T) v for every head, block by block, so that memory is linear in the number of
/// tokens. q (batch, heads, tokens, head_dim), k and v (batch, kv heads, keys, features), all of one dtype;
/// heads is a multiple of kv heads. As in torch's scaled_dot_product_attention, inputs may also be (heads,
/// tokens, features) or (tokens, features), or have several leading dimensions, which are one batch. Sizes in
/// front of the tokens broadcast. The results then have these dimensions, too. The result is 0 for a query
/// that attends to no key. Differentiable once with respect to q, k, v, bias and sinks.
SHOESTRING_API at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const AttentionOptions& options = {});

struct AttentionResult {
  at::Tensor out;
  /// Log-sum-exp of the scores, including the sink: (batch, heads, tokens), or (heads, tokens) for packed
  /// sequences; fp32, or fp64 for fp64 inputs.
  at::Tensor lse;
};
/// Computes attention and the log-sum-exp of its scores. Both results are differentiable.
SHOESTRING_API AttentionResult attention_with_lse(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v, const AttentionOptions& options = {});

/// Assigns sequences to bins so that no bin holds more than `capacity` tokens, to build packed batches.
/// lengths (sequences), int64 on the CPU. Returns the index of each sequence's bin, counted from 0. The
/// algorithm is first-fit decreasing; it takes O(n log n) steps.
SHOESTRING_API at::Tensor pack_sequences(const at::Tensor& lengths, int64_t capacity);

struct QuantizeOptions {
  /// Quantisation format: "nf4" (4-bit NormalFloat, QLoRA), "fp4" or "int4" (fitted scale and offset, as in
  /// HQQ). Operators that read a quantised weight, and layers that quantise their weight, also accept "int8".
  TORCH_ARG(std::string, quant_type) = "nf4";
  /// The number of elements that share a scale: a power of two from 32 to 4096. For an int8 weight it is the
  /// length of a row.
  TORCH_ARG(int64_t, block_size) = 64;
};

/// Quantises x (fp32, bf16 or fp16) to 4 bits per element, in blocks of the flattened tensor. Returns packed
/// uint8 ((numel + 1) / 2) and absmax fp32 (blocks). The element with the even index is in the upper four
/// bits of a byte. For "nf4" and "fp4" the bytes equal those of bitsandbytes. For "int4" absmax is int32: a
/// bf16 scale in the lower half and a bf16 offset in the upper half. Its values are (code - 8) * scale +
/// offset.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> quantize_4bit(const at::Tensor& x,
                                                                const QuantizeOptions& options = {});

/// Quantises the scales of quantize_4bit to 8 bits each (double quantisation). Returns codes uint8 (blocks)
/// and nested fp32 (257 + blocks / 256, rounded up). `nested` holds an offset, the 256 values of the codes,
/// and one scale per 256 codes.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> quantize_absmax(const at::Tensor& absmax);

/// Dequantises the results of quantize_4bit to a tensor of `shape` and `dtype` (fp32, bf16 or fp16). If
/// `nested` is given, absmax holds the codes of quantize_absmax.
SHOESTRING_API at::Tensor dequantize_4bit(const at::Tensor& packed, const at::Tensor& absmax,
                                          at::IntArrayRef shape, at::ScalarType dtype,
                                          const std::optional<at::Tensor>& nested = std::nullopt,
                                          const QuantizeOptions& options = {});

/// Quantises each row of x (..., columns), fp32, bf16 or fp16, to int8. Returns codes in the shape of x and
/// absmax fp32 (...), the largest magnitude of each row. The bytes equal those of bitsandbytes' LLM.int8()
/// weights. A row with a NaN or an infinity dequantises to NaN.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> quantize_int8(const at::Tensor& x);
/// Dequantises the results of quantize_int8: returns packed * absmax / 127 in `dtype`, which is fp32, bf16 or
/// fp16.
SHOESTRING_API at::Tensor dequantize_int8(const at::Tensor& packed, const at::Tensor& absmax,
                                          at::ScalarType dtype);

/// Dequantises the results of quantize_4bit or quantize_int8 into `out`, a contiguous fp32, bf16 or fp16
/// tensor.
SHOESTRING_API void dequantize_(const at::Tensor& out, const at::Tensor& packed, const at::Tensor& absmax,
                                const std::optional<at::Tensor>& nested = std::nullopt,
                                const QuantizeOptions& options = {});

/// Returns x (fp32, bf16 or fp16) as its quantised form represents it: bit for bit, the result of quantising
/// x with these options and of dequantising it to the dtype of x. With double_quant, the scales are quantised
/// as well. For "int8", block_size is the default or the length of a row. The gradient is straight-through
/// (arXiv 1308.3432): that of the result is passed on to x unchanged, for every element. The codes are not
/// stored, except with double_quant.
SHOESTRING_API at::Tensor fake_quantize(const at::Tensor& x, const QuantizeOptions& options = {},
                                        bool double_quant = false);

/// Computes self (m, n) = beta * self + alpha * mat1 (m, k) mat2 (k, n), accumulated in fp32. self may be
/// fp32 if the matrices are bf16 or fp16, for example an fp32 buffer that accumulates a weight's gradient.
/// Not differentiable.
SHOESTRING_API void addmm_(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2,
                           double beta = 1, double alpha = 1);

/// Quantises optimizer state x to block-wise 8-bit codes in the shape of x and one fp32 scale per 256
/// elements. A tensor with negative elements needs is_signed = true.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> quantize_8bit(const at::Tensor& x, bool is_signed);
SHOESTRING_API at::Tensor dequantize_8bit(const at::Tensor& codes, const at::Tensor& scale, bool is_signed);

/// Quantises optimizer state x to flat 4-bit codes, 128 bytes per 256 elements. Returns the codes and fp32
/// scales: one scale per 32 elements if is_signed, otherwise one per 128. A tensor with negative elements
/// needs is_signed = true. If `step` is given, the rounding direction depends on the step, so that rounding
/// errors average out over the steps. Without `step`, values are rounded to the nearest code.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> quantize_state_4bit(
    const at::Tensor& x, bool is_signed, std::optional<int64_t> step = std::nullopt);
/// Dequantises the first `numel` elements of the results of quantize_state_4bit. Returns a flat fp32 tensor.
SHOESTRING_API at::Tensor dequantize_state_4bit(const at::Tensor& codes, const at::Tensor& scale,
                                                bool is_signed, int64_t numel);

/// Returns the bytes of a gradient of `numel` elements that is compressed to 8, 4 or 1 bits: a record of 260
/// bytes per 256 elements, of 68 bytes per 128 elements, or of 36 bytes per 256 elements.
SHOESTRING_API int64_t compressed_gradient_bytes(int64_t numel, int64_t bits);
/// Compresses a gradient (fp32, bf16 or fp16) to 8, 4 or 1 bits with error feedback: adds it to `error`
/// (fp32, as many elements), writes the codes of the sums to `codes`, uint8 (compressed_gradient_bytes), and
/// subtracts what the codes stand for from `error`. With 8 and 4 bits the subtraction is exact. A block with
/// NaN, with infinity or with magnitudes from 2^127 on decompresses to NaN, and its errors become 0.
SHOESTRING_API void compress_gradient_(at::Tensor& error, const at::Tensor& gradient, at::Tensor& codes,
                                       int64_t bits);
/// Writes the mean of compressed gradients, the rows of `codes` (ranks, bytes), to `out` (fp32, bf16 or fp16,
/// contiguous), which has the number of elements of each gradient. Bytes of a row beyond them are ignored.
SHOESTRING_API void decompress_mean_(at::Tensor& out, const at::Tensor& codes, int64_t bits);

/// Computes x W^T + bias for a frozen quantised weight W (out_features, in_features) and x (...,
/// in_features). packed and absmax are the results of quantize_4bit or quantize_int8; with `nested`, absmax
/// holds the codes of quantize_absmax. The weight is dequantised one panel of rows at a time. x and bias
/// receive gradients.
SHOESTRING_API at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& packed,
                                           const at::Tensor& absmax, int64_t out_features,
                                           const std::optional<at::Tensor>& bias = std::nullopt,
                                           const std::optional<at::Tensor>& nested = std::nullopt,
                                           const QuantizeOptions& options = {});

/// Drops each element of x with probability p and divides the others by 1 - p. The mask depends only on
/// `seed` (one int64 on x's device) and the element's index, so backward generates the mask again.
/// Differentiable.
SHOESTRING_API at::Tensor seeded_dropout(const at::Tensor& x, const at::Tensor& seed, double p);

/// Computes silu(gate) * up in fp32 and rounds once. Saves only gate and up for backward.
SHOESTRING_API at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// Computes gelu(gate) * up in fp32 and rounds once. `approximate` is "none" (the exact GELU) or "tanh".
/// Saves only gate and up for backward.
SHOESTRING_API at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up,
                                const std::string& approximate = "none");

/// Computes gelu(x) in fp32 and rounds once. `approximate` is "none" (the exact GELU) or "tanh". Saves only x
/// for backward.
SHOESTRING_API at::Tensor gelu(const at::Tensor& x, const std::string& approximate = "none");

struct RMSNormOptions {
  explicit RMSNormOptions(double eps) : eps_(eps) {}
  /// A constant that is added to the mean of squares.
  TORCH_ARG(double, eps);
  /// A constant that is added to the weight. Gemma uses 1.
  TORCH_ARG(double, offset) = 0.0;
  /// Selects which values are rounded to 16 bits before the multiplication by the weight, if the input has 16
  /// bits. With "llama", the normalised row is rounded. With "gemma", no value is rounded. With "none", the
  /// reciprocal root, the normalised row and the weight are rounded. The gradients are those of the function
  /// without rounding.
  TORCH_ARG(std::string, upcast) = "llama";
  /// The dtype of the result: bf16 or fp16 for rows of fp32. Linear layers under autocast take such results
  /// without another conversion. x of that dtype can be added to a residual of fp32.
  TORCH_ARG(std::optional<at::ScalarType>, out_dtype) = std::nullopt;
};

/// Computes x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, with fp32 sums. Returns
/// x's dtype or options.out_dtype. weight (features), any floating-point dtype. Saves x and one number per
/// row for backward.
SHOESTRING_API at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                                   const RMSNormOptions& options);
/// Returns rms_norm(x + residual) and x + residual, computed in one pass.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                               const at::Tensor& residual,
                                                               const std::optional<at::Tensor>& weight,
                                                               const RMSNormOptions& options);

/// Computes (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in fp32. Returns
/// x's dtype or out_dtype, which is bf16 or fp16 for fp32 x. weight and bias (features), any floating-point
/// dtype. Saves x and two numbers per row for backward.
SHOESTRING_API at::Tensor layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                                     const std::optional<at::Tensor>& bias, double eps,
                                     std::optional<at::ScalarType> out_dtype = std::nullopt);
/// Returns layer_norm(x + residual) and x + residual, computed in one pass. Both have the dtype of the
/// residual, which may be fp32 while x is 16-bit; with out_dtype, the norm has that dtype.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> add_layer_norm(
    const at::Tensor& x, const at::Tensor& residual, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps,
    std::optional<at::ScalarType> out_dtype = std::nullopt);

struct RopeOptions {
  /// The number of elements of each head that are rotated, counted from the first element. The default is all
  /// elements.
  TORCH_ARG(std::optional<int64_t>, rotary_dim) = std::nullopt;
  /// If true, a pair of elements that is rotated together consists of two neighbouring elements. Otherwise
  /// the elements of a pair are rotary_dim / 2 apart.
  TORCH_ARG(bool, interleaved) = false;
  /// (tokens) or (1 or batch, tokens), int64: the row of cos and sin (positions, width) for each token.
  TORCH_ARG(std::optional<at::Tensor>, position_ids) = std::nullopt;
  /// (head_dim): weights of an RMSNorm that is applied to each head of q and k before the rotation. The
  /// normalised head is multiplied by offset + weight. Give both weights or neither.
  TORCH_ARG(std::optional<at::Tensor>, q_weight) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, k_weight) = std::nullopt;
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, offset) = 0.0;
};

/// Applies rotary position embedding to q and k, (batch, heads, tokens, head_dim) or (tokens, heads,
/// head_dim) with any strides. Computes in fp32 and rounds once. cos and sin are (tokens, width) or (1 or
/// batch, tokens, width); with position_ids they are (positions, width). width is rotary_dim / 2, or
/// rotary_dim if each angle is stored twice. q, k, q_weight and k_weight receive gradients. Without q_weight
/// and k_weight, q and k are not saved for backward.
SHOESTRING_API std::tuple<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k,
                                                       const at::Tensor& cos, const at::Tensor& sin,
                                                       const RopeOptions& options = {});

/// A frozen linear layer, optionally with a LoRA adapter.
struct LoraWeight {
  LoraWeight(at::Tensor weight) : weight_(std::move(weight)) {}
  /// (out_features, in_features): a dense weight in x's dtype or, if absmax is given, the codes of a
  /// quantised weight.
  TORCH_ARG(at::Tensor, weight);
  TORCH_ARG(std::optional<at::Tensor>, absmax) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, nested) = std::nullopt;
  TORCH_ARG(QuantizeOptions, quantize) = {};
  /// (out_features). bias, lora_A, lora_B, gain and low_scale may have any floating-point dtype.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  /// lora_A (rank, in_features) and lora_B (out_features, rank). Give both or neither.
  TORCH_ARG(std::optional<at::Tensor>, lora_A) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, lora_B) = std::nullopt;
  /// Factor of the low-rank product: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
  TORCH_ARG(double, scaling) = 1;
  /// (out_features): a factor for the output before the bias is added. For DoRA it is magnitude /
  /// lora_weight_norm. An element that is 0 receives a gradient of 0.
  TORCH_ARG(std::optional<at::Tensor>, gain) = std::nullopt;
  /// (tokens, rank): a factor for x lora_A^T that receives no gradient. Zeros disable an adapter for a token.
  TORCH_ARG(std::optional<at::Tensor>, low_scale) = std::nullopt;
};

/// Operations on the input x of one or more LoraWeight layers before the layers read it.
struct LoraInput {
  /// If given, the layers read silu(gate) * x, as in SwiGLU's down projection. silu(gate) and silu(gate) * x
  /// are not saved for backward.
  TORCH_ARG(std::optional<at::Tensor>, gate) = std::nullopt;
  /// dropout is the probability of dropping an element of the input of the lora_A matrices. seed, one int64
  /// on x's device, is the seed of the dropout mask. seed is only given with dropout.
  TORCH_ARG(double, dropout) = 0;
  TORCH_ARG(std::optional<at::Tensor>, seed) = std::nullopt;
};

/// Computes `gain * (x W^T + scaling * (x lora_A^T) lora_B^T) + bias` for x (..., in_features), in x's dtype.
/// x, gate, bias, lora_A, lora_B and gain receive gradients. x is saved once for backward.
SHOESTRING_API at::Tensor lora_linear(const at::Tensor& x, const LoraWeight& layer,
                                      const LoraInput& input = {});

/// Computes lora_linear for several layers with the same input, such as the query, key and value projections.
/// One matrix product serves all lora_A matrices, and the gradients of x are summed once.
SHOESTRING_API std::vector<at::Tensor> lora_linear_group(const at::Tensor& x,
                                                         const std::vector<LoraWeight>& layers,
                                                         const LoraInput& input = {});

/// Returns the norms of the rows of W + scaling * lora_B lora_A, (out_features) in fp32 (fp64 for fp64). DoRA
/// (arXiv 2402.09353) divides its magnitudes by these norms. Allocates no temporary of W's size. Not
/// differentiable.
SHOESTRING_API at::Tensor lora_weight_norm(const LoraWeight& layer);

}  // namespace shoestring
