#pragma once

#include <optional>
#include <string_view>
#include <variant>

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include "core/tensors.h"
#include "quantization/quantize_4bit_table.h"
#include "quantization/quantize_int8_table.h"

namespace shoestring::quantization {

// In double quantisation, this many scales share one second-level scale. There are also 256 values, because
// codes have 8 bits.
constexpr int64_t kNestedBlock = 256;
constexpr int64_t kNestedHead =
    1 + 256;  // the offset and the 256 values, which precede the scales in `nested`

/// Returns the code book of "nf4", "fp4" or "int4". Raises an error that names `op` for any other type.
const kernels::Codebook& codebook(const char* op, c10::string_view quant_type);

/// Raises an error if the 4-bit format does not support this block size.
void check_block_size(const char* op, int64_t block_size);

/// Raises an error if the tensors do not form a quantised tensor of `numel` elements on `device`. For "nf4",
/// "fp4" and "int4" they are the results of quantize_4bit. For "int8" they are those of quantize_int8, and
/// block_size is the length of a row.
void check_packed(const char* op, const at::Tensor& packed, const at::Tensor& absmax,
                  const std::optional<at::Tensor>& nested, const c10::SymInt& numel,
                  c10::string_view quant_type, int64_t block_size, c10::Device device);

/// A quantised tensor (4 bits or int8) in the form that its kernels read. It keeps its tensors alive and
/// makes them contiguous if necessary.
class PackedReader {
 public:
  /// op: a string literal that names the operator in error messages.
  PackedReader(Backend backend, const char* op, const at::Tensor& packed, const at::Tensor& absmax,
               const std::optional<at::Tensor>& nested, c10::string_view quant_type, int64_t block_size);

  Backend backend() const { return backend_; }

  /// Dequantises elements [begin, begin + out.numel()) into `out`, a contiguous fp32, bf16 or fp16 tensor.
  /// Uses all threads on the CPU, or the current stream of the device, which the caller has made current. On
  /// CUDA, begin is a multiple of 8; for int8 the elements are whole rows.
  void read(int64_t begin, const at::Tensor& out) const;

  /// Returns true if multiply() supports this number of tokens for a weight with `columns` columns: on the
  /// CPU, with few tokens and rows of whole blocks.
  bool multiplies(int64_t tokens, int64_t columns) const;
  /// Returns x (tokens, columns) times the transpose of the weight without storing the dequantised weight. x
  /// and the result are fp32.
  at::Tensor multiply(const at::Tensor& x, int64_t rows) const;

 private:
  void read_cpu(int64_t begin, const at::Tensor& out) const;
  void read_cuda(int64_t begin, const at::Tensor& out) const;

  Backend backend_;
  const char* op_;
  at::Tensor packed_, absmax_, nested_;
  std::variant<kernels::Packed, kernels::PackedInt8> view_;
};

}  // namespace shoestring::quantization
