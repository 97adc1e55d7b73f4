#include <cmath>

#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/init.h>

#include <shoestring/gemm/linear.h>

namespace shoestring::nn {

using at::Tensor;

LinearImpl::LinearImpl(const torch::nn::LinearOptions& options) : options(options) { reset(); }

void LinearImpl::reset() {
  weight = register_parameter("weight", torch::empty({options.out_features(), options.in_features()}));
  bias = register_parameter("bias", options.bias() ? torch::empty({options.out_features()}) : Tensor(),
                            /*requires_grad=*/options.bias());
  reset_parameters();
}

void LinearImpl::reset_parameters() {
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));
  if (!bias.defined()) return;
  const double bound = 1 / std::sqrt(static_cast<double>(options.in_features()));
  torch::nn::init::uniform_(bias, -bound, bound);
}

Tensor LinearImpl::forward(const Tensor& x) {
  return shoestring::linear(x, weight, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt);
}

Tensor LinearImpl::forward_with_residual(const Tensor& x, const Tensor& residual) {
  return shoestring::linear(x, weight, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt,
                            LinearOptions().residual(residual));
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::Linear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << (options.bias() ? "true" : "false")
         << ")";
}

}  // namespace shoestring::nn
