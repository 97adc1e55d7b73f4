#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/layers/norm.h>

namespace shoestring::nn {

using at::Tensor;

RMSNormImpl::RMSNormImpl(int64_t features, RMSNormOptions options)
    : features(features), options(std::move(options)) {
  reset();
}

void RMSNormImpl::reset() {
  weight = register_parameter("weight", torch::full({features}, 1 - options.offset()));
}

Tensor RMSNormImpl::forward(const Tensor& x) { return rms_norm(x, weight, options); }

std::tuple<Tensor, Tensor> RMSNormImpl::forward_with_residual(const Tensor& x, const Tensor& residual) {
  return add_rms_norm(x, residual, weight, options);
}

void RMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::RMSNorm(" << features << ", eps=" << options.eps()
         << ", offset=" << options.offset() << ", upcast=" << options.upcast() << ")";
}

LayerNormImpl::LayerNormImpl(const LayerNormOptions& options) : options(options) { reset(); }

void LayerNormImpl::reset() {
  weight = register_parameter("weight", torch::ones({options.features()}));
  if (options.bias()) bias = register_parameter("bias", torch::zeros({options.features()}));
}

Tensor LayerNormImpl::forward(const Tensor& x) {
  return layer_norm(x, weight, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt, options.eps());
}

std::tuple<Tensor, Tensor> LayerNormImpl::forward_with_residual(const Tensor& x, const Tensor& residual) {
  return add_layer_norm(x, residual, weight, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt,
                        options.eps());
}

void LayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::LayerNorm(" << options.features() << ", eps=" << options.eps()
         << ", bias=" << (options.bias() ? "true" : "false") << ")";
}

}  // namespace shoestring::nn
