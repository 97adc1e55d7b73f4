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

// In double quantisation, kNestedBlock first-level scales share one second-level scale. The first-level
// scales have 8-bit codes, so their table has 256 values as well.
constexpr int64_t kNestedBlock = 256;
// In the tensor `nested`, an offset and the 256 values precede the second-level scales.
constexpr int64_t kNestedHead = 1 + 256;

/// Returns the code book of "nf4", "fp4" or "int4". Raises an error that names `op` for any other type.
const kernels::Codebook& codebook(const char* op, c10::string_view quant_type);

/// Raises an error unless block_size is a power of two from 32 to 4096, which the 4-bit formats support.
void check_block_size(const char* op, int64_t block_size);

/// Raises an error if packed, absmax and nested do not form a quantised tensor of `numel` elements on
/// `device`. For "nf4", "fp4" and "int4" the tensors are the results of quantize_4bit and quantize_absmax.
/// For "int8" the tensors are the results of quantize_int8, and block_size is the length of a row.
void check_packed(const char* op, const at::Tensor& packed, const at::Tensor& absmax,
                  const std::optional<at::Tensor>& nested, const c10::SymInt& numel,
                  c10::string_view quant_type, int64_t block_size, c10::Device device);

/// Gives the kernels access to a quantised tensor (4 bits or int8). Keeps the tensor's parts alive and makes
/// them contiguous if necessary.
class PackedReader {
 public:
  /// `op` names the operator in error messages. It must be a string literal, because the string is not
  /// copied.
  PackedReader(Backend backend, const char* op, const at::Tensor& packed, const at::Tensor& absmax,
               const std::optional<at::Tensor>& nested, c10::string_view quant_type, int64_t block_size);

  Backend backend() const { return backend_; }

  /// Dequantises elements [begin, begin + out.numel()) into `out`, a contiguous fp32, bf16 or fp16 tensor.
  /// Uses all threads on the CPU, or the current stream on CUDA, where the caller must have made the device
  /// current. On CUDA, begin must be a multiple of 8; for int8, the elements must be whole rows.
  void read(int64_t begin, const at::Tensor& out) const;

  /// Dequantises elements [begin, begin + count) of a CPU tensor into `out`, fp32 or bf16, on the calling
  /// thread.
  void read(int64_t begin, int64_t count, float* out) const;
  void read(int64_t begin, int64_t count, uint16_t* out) const;

  /// Returns whether multiply() supports this number of tokens for a weight with `columns` columns. It
  /// supports only the CPU, few tokens, and weights whose rows consist of whole blocks.
  bool multiplies(int64_t tokens, int64_t columns) const;
  /// Returns x (tokens, columns) times the transpose of the weight (rows, columns), without storing the
  /// dequantised weight. x and the result are fp32.
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
