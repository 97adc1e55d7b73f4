#include <cmath>

#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/init.h>

#include <shoestring/gemm/ops.h>
#include <shoestring/quantization/fake_quantized_linear.h>

#include "quantization/without_weight.h"

namespace shoestring::nn {

using at::Tensor;

FakeQuantizedLinearImpl::FakeQuantizedLinearImpl(const QuantizedLinearOptions& options) : options(options) {
  reset();
}

void FakeQuantizedLinearImpl::reset() {
  const auto dtype = weight.defined() ? weight.scalar_type() : at::kFloat;
  weight = register_parameter("weight", torch::empty({options.out_features(), options.in_features()}, dtype));
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));
  if (!options.bias()) return;
  const double bound = 1 / std::sqrt(static_cast<double>(options.in_features()));
  bias = register_parameter("bias", torch::empty({options.out_features()}, dtype).uniform_(-bound, bound));
}

Tensor FakeQuantizedLinearImpl::forward(const Tensor& x) {
  return dense_linear(x, fake_quantize(weight, options.quantize(), options.double_quant()),
                      bias.defined() ? std::optional<Tensor>(bias) : std::nullopt);
}

QuantizedLinear FakeQuantizedLinearImpl::quantized() const {
  QuantizedLinear layer = quantization::without_weight(options);
  layer->set_weight(weight.detach());
  if (bias.defined()) {
    layer->options.bias(true);
    layer->bias = layer->register_parameter("bias", bias, bias.requires_grad());
  }
  layer->train(is_training());
  return layer;
}

void FakeQuantizedLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::FakeQuantizedLinear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << (options.bias() ? "true" : "false")
         << ", " << options.quantize().quant_type() << ", block_size=" << options.quantize().block_size()
         << ", double_quant=" << (options.double_quant() ? "true" : "false") << ")";
}

}  // namespace shoestring::nn
