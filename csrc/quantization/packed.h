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

// A scale of the scales serves this many of them, and there are so many values for a scale's 8 bits.
constexpr int64_t kNestedBlock = 256;
constexpr int64_t kNestedHead = 1 + 256;  // offset and values, before the scales in `nested`

/// The code book of "nf4", "fp4" or "int4"; an error that names `op` for anything else.
const kernels::Codebook& codebook(const char* op, c10::string_view quant_type);

/// Refuses a block size that the format does not have.
void check_block_size(const char* op, int64_t block_size);

/// Refuses parts that do not fit a quantised tensor of `numel` elements on `device`. The parts of "nf4",
/// "fp4" and "int4" are those of quantize_4bit; those of "int8" are quantize_int8's, with block_size the
/// length of a row.
void check_packed(const char* op, const at::Tensor& packed, const at::Tensor& absmax,
                  const std::optional<at::Tensor>& nested, const c10::SymInt& numel,
                  c10::string_view quant_type, int64_t block_size, c10::Device device);

/// A quantised tensor, of 4 bits or int8, as its kernels read it. It holds the parts, made contiguous where
/// they were not.
class PackedReader {
 public:
  /// op: a literal, for error messages.
  PackedReader(Backend backend, const char* op, const at::Tensor& packed, const at::Tensor& absmax,
               const std::optional<at::Tensor>& nested, c10::string_view quant_type, int64_t block_size);

  Backend backend() const { return backend_; }

  /// Elements [begin, begin + out.numel()) into `out`, contiguous fp32, bf16 or fp16: on all threads, or on
  /// the stream of the device, which the caller has made the current one. On CUDA begin is a multiple of 8,
  /// or of int8 the elements are whole rows.
  void read(int64_t begin, const at::Tensor& out) const;

  /// True where multiply() takes so few tokens of a (rows, columns) weight: on the CPU, with rows of whole
  /// blocks.
  bool multiplies(int64_t tokens, int64_t columns) const;
  /// x (tokens, columns) times the weight's transpose, without writing the weight out; fp32, x as well.
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
