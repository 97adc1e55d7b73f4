#pragma once

// The operators of quantised weights, optimizer state and gradients.

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring {

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

}  // namespace shoestring
