#include <cmath>

#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/init.h>

#include <shoestring/experts/experts.h>

namespace shoestring::nn {

using at::Tensor;

ExpertsImpl::ExpertsImpl(const ExpertsOptions& options) : options(options) {
  const auto is_positive = [](const char* name, int64_t number) {
    TORCH_CHECK_VALUE(number > 0, "nn::Experts: ", name, ": expected a number above 0, received ", number);
  };
  is_positive("experts", options.experts());
  is_positive("features", options.features());
  is_positive("hidden", options.hidden());
  const std::string& name = options.activation();
  TORCH_CHECK_VALUE(
      name == "silu" || name == "gelu" || name == "gelu_tanh" || name == "swigluoai",
      "nn::Experts: activation: expected 'silu', 'gelu', 'gelu_tanh' or 'swigluoai', received '", name, "'");
  TORCH_CHECK_VALUE(options.limit().value_or(1) > 0,
                    "nn::Experts: limit: expected none or a number above 0, received ", *options.limit());
  reset();
}

void ExpertsImpl::reset() {
  const int64_t experts = options.experts(), features = options.features(), hidden = options.hidden();
  const auto stack = [&](int64_t out, int64_t in) {
    return options.transposed() ? torch::empty({experts, in, out}) : torch::empty({experts, out, in});
  };
  gate_up_proj = register_parameter("gate_up_proj", stack(2 * hidden, features));
  down_proj = register_parameter("down_proj", stack(features, hidden));
  if (options.bias()) {
    gate_up_proj_bias = register_parameter("gate_up_proj_bias", torch::empty({experts, 2 * hidden}));
    down_proj_bias = register_parameter("down_proj_bias", torch::empty({experts, features}));
  }
  reset_parameters();
}

void ExpertsImpl::reset_parameters() {
  const auto fill = [](const Tensor& t, int64_t in_features) {
    const double bound = 1 / std::sqrt(static_cast<double>(in_features));
    if (t.defined()) torch::nn::init::uniform_(t, -bound, bound);
  };
  fill(gate_up_proj, options.features());
  fill(gate_up_proj_bias, options.features());
  fill(down_proj, options.hidden());
  fill(down_proj_bias, options.hidden());
}

Tensor ExpertsImpl::forward(const Tensor& x, const Tensor& index, const Tensor& weight) {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == options.features(), "nn::Experts: x: expected (..., ",
                    options.features(), "), received ", x.sizes());
  const auto optional = [](const Tensor& t) { return t.defined() ? std::optional<Tensor>(t) : std::nullopt; };
  return moe_experts(x, index, weight, gate_up_proj, down_proj,
                     MoeExpertsOptions()
                         .gate_up_bias(optional(gate_up_proj_bias))
                         .down_bias(optional(down_proj_bias))
                         .activation(options.activation())
                         .limit(options.limit())
                         .interleaved(options.interleaved())
                         .transposed(options.transposed()));
}

void ExpertsImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::Experts(experts=" << options.experts() << ", features=" << options.features()
         << ", hidden=" << options.hidden() << ", activation=" << options.activation();
  if (options.limit()) stream << ", limit=" << *options.limit();
  stream << ", bias=" << (options.bias() ? "true" : "false");
  if (options.interleaved()) stream << ", interleaved=true";
  if (options.transposed()) stream << ", transposed=true";
  stream << ")";
}

}  // namespace shoestring::nn
