#pragma once

#include <cstdint>
#include <ostream>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/core/export.h>
#include <shoestring/quantization/quantized_linear.h>

namespace shoestring::nn {

/// torch::nn::Linear for quantisation-aware training. Forward computes with fake_quantize(weight), the weight
/// that QuantizedLinear will have. The gradient goes to the dense weight, which an optimizer trains. The
/// parameters and their initialisation are those of torch::nn::Linear.
class SHOESTRING_API FakeQuantizedLinearImpl : public torch::nn::Cloneable<FakeQuantizedLinearImpl> {
 public:
  FakeQuantizedLinearImpl(int64_t in_features, int64_t out_features)
      : FakeQuantizedLinearImpl(QuantizedLinearOptions(in_features, out_features)) {}
  explicit FakeQuantizedLinearImpl(const QuantizedLinearOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& x);
  /// Returns a layer with the quantised weight and the same bias tensor. Its dequantised weight equals, bit
  /// for bit, the weight with which forward computes.
  QuantizedLinear quantized() const;

  QuantizedLinearOptions options;
  at::Tensor weight;  ///< (out_features, in_features)
  at::Tensor bias;    ///< (out_features); undefined if options.bias() is false
};
TORCH_MODULE(FakeQuantizedLinear);

}  // namespace shoestring::nn
