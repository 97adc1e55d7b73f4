#pragma once

#include <cstdint>
#include <optional>
#include <ostream>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/core/export.h>
#include <shoestring/quantization/ops.h>

namespace shoestring::nn {

struct QuantizedLinearOptions {
  QuantizedLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  /// The quantisation format. quant_type is "nf4", "fp4", "int4" or "int8". For "int8", block_size is set to
  /// in_features.
  TORCH_ARG(QuantizeOptions, quantize) = {};
  /// If true, the scales are quantised to 8 bits (double quantisation); for "nf4" and "fp4" only.
  TORCH_ARG(bool, double_quant) = false;
};

/// A linear layer with a frozen weight in 4 bits (QLoRA) or int8. A 4-bit weight has bitsandbytes' byte
/// order. Its shape is (out_features, in_features / 2) if every row consists of whole blocks; otherwise it is
/// flat. An int8 weight is (out_features, in_features) with one scale per row. `to(dtype)` does not convert
/// the quantised weight or its scales.
class SHOESTRING_API QuantizedLinearImpl : public torch::nn::Cloneable<QuantizedLinearImpl> {
 public:
  QuantizedLinearImpl(int64_t in_features, int64_t out_features)
      : QuantizedLinearImpl(QuantizedLinearOptions(in_features, out_features)) {}
  explicit QuantizedLinearImpl(const QuantizedLinearOptions& options);

  /// Initialises a weight as torch::nn::Linear does and quantises it.
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  using torch::nn::Module::to;

  /// Maps x (..., in_features) to (..., out_features) in x's dtype.
  at::Tensor forward(const at::Tensor& x);
  /// Quantises a dense (out_features, in_features) weight and stores it in the layer.
  void set_weight(const at::Tensor& dense);
  /// Stores a weight that is already quantised: the results of quantize_4bit (and quantize_absmax if nested)
  /// or quantize_int8, in any shape. The layer takes over the quantisation format of these results.
  void set_parts(const at::Tensor& bytes, const at::Tensor& scales, const at::Tensor& second,
                 const QuantizeOptions& quantize);
  /// Returns the dense weight in fp32, bf16 or fp16.
  at::Tensor dequantize(at::ScalarType dtype) const;

  QuantizedLinearOptions options;
  at::Tensor packed;                  ///< codes: uint8 for 4 bits, int8 for "int8"
  at::Tensor absmax;                  ///< scales of blocks: fp32, uint8 codes if nested, or int32 for "int4"
  at::Tensor nested;                  ///< fp32, the second result of quantize_absmax; undefined if not nested
  at::Tensor bias;                    ///< (out_features); undefined without a bias
  at::ScalarType dtype = at::kFloat;  ///< dtype of the dense weight before quantisation

 private:
  void take(at::Tensor bytes, at::Tensor scales, const at::Tensor& second);
  void keep_parts(const at::Tensor& packed_was, const at::Tensor& absmax_was, const at::Tensor& nested_was);
};
TORCH_MODULE(QuantizedLinear);

}  // namespace shoestring::nn
