#pragma once

#include <cstdint>
#include <optional>
#include <ostream>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/export.h>
#include <shoestring/ops.h>

namespace shoestring::nn {

struct QuantizedLinearOptions {
  QuantizedLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  /// quant_type "nf4", "fp4", "int4" or "int8", whose block_size becomes in_features.
  TORCH_ARG(QuantizeOptions, quantize) = {};
  /// Of "nf4" and "fp4": 8-bit scales (double quantisation).
  TORCH_ARG(bool, nested) = false;
};

/// A linear layer over a frozen weight of 4 bits (QLoRA) or int8. The 4-bit bytes are bitsandbytes' flat
/// order, held as (out_features, in_features / 2) where rows are whole blocks, else flat; int8 is
/// (out_features, in_features) with a scale a row. `to(dtype)` leaves them alone.
class SHOESTRING_API QuantizedLinearImpl : public torch::nn::Cloneable<QuantizedLinearImpl> {
 public:
  QuantizedLinearImpl(int64_t in_features, int64_t out_features)
      : QuantizedLinearImpl(QuantizedLinearOptions(in_features, out_features)) {}
  explicit QuantizedLinearImpl(const QuantizedLinearOptions& options);

  /// Draws a weight as torch::nn::Linear does, and quantises it.
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  using torch::nn::Module::to;

  /// (..., in_features) to (..., out_features), in x's dtype.
  at::Tensor forward(const at::Tensor& x);
  /// Takes the values of a dense (out_features, in_features) weight.
  void set_weight(const at::Tensor& dense);
  /// Takes parts that are quantised already, as quantize_4bit (nested: and quantize_absmax) or quantize_int8
  /// returns them, in any shape; their type becomes the layer's.
  void set_parts(const at::Tensor& bytes, const at::Tensor& scales, const at::Tensor& second,
                 const QuantizeOptions& quantize);
  /// The dense weight: fp32, bf16 or fp16.
  at::Tensor dequantize(at::ScalarType dtype) const;

  QuantizedLinearOptions options;
  at::Tensor packed;                  // uint8; int8
  at::Tensor absmax;                  // fp32, or uint8 codes where the scales are nested, or int4's int32
  at::Tensor nested;                  // undefined, or fp32: see quantize_absmax
  at::Tensor bias;                    // undefined without bias
  at::ScalarType dtype = at::kFloat;  // of the dense weight that it was

 private:
  void take(at::Tensor bytes, at::Tensor scales, const at::Tensor& second);
  void keep_parts(const at::Tensor& packed_was, const at::Tensor& absmax_was, const at::Tensor& nested_was);
};
TORCH_MODULE(QuantizedLinear);

}  // namespace shoestring::nn
