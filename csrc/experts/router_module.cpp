#include <cmath>

#include <ATen/ops/sign.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/init.h>

#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/experts/router.h>
#include <shoestring/gemm/ops.h>

namespace shoestring::nn {

using at::Tensor;

namespace {

MoeRoute route(const RouterOptions& o, const Tensor& logits, const Tensor& bias,
               const std::optional<Tensor>& mask = std::nullopt) {
  return moe_route(logits, o.top_k(),
                   MoeRouteOptions()
                       .score(o.score())
                       .bias(bias.defined() ? std::optional<Tensor>(bias) : std::nullopt)
                       .renormalize(o.renormalize())
                       .groups(o.groups())
                       .top_groups(o.top_groups())
                       .scale(o.scale())
                       .mask(mask));
}

}  // namespace

RouterImpl::RouterImpl(const RouterOptions& options) : options(options) {
  TORCH_CHECK_VALUE(options.features() > 0, "nn::Router: features: expected a number above 0, received ",
                    options.features());
  TORCH_CHECK_VALUE(options.experts() > 0, "nn::Router: experts: expected a number above 0, received ",
                    options.experts());
  TORCH_CHECK_VALUE(std::isfinite(options.bias_rate()) && options.bias_rate() >= 0,
                    "nn::Router: bias_rate: expected a number of at least 0, received ", options.bias_rate());
  // The operator checks the other options.
  route(options, at::empty({0, options.experts()}, at::kMeta), Tensor());
  reset();
}

void RouterImpl::reset() {
  weight = register_parameter("weight", torch::empty({options.experts(), options.features()}));
  if (options.bias_rate() > 0) {
    bias = register_buffer("bias", at::zeros({options.experts()}, at::kFloat));
    counts = register_buffer("counts", at::zeros({options.experts()}, at::kLong));
  }
  reset_parameters();
}

void RouterImpl::reset_parameters() {
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));
  if (!bias.defined()) return;
  bias.zero_();
  counts.zero_();
}

MoeRoute RouterImpl::forward(const Tensor& x, const std::optional<Tensor>& mask) {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == options.features(), "nn::Router: x: expected (..., ",
                    options.features(), "), received ", x.sizes());
  const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor logits = linear(x, weight, std::nullopt, LinearOptions().dtype(dtype));
  MoeRoute result = route(options, logits, bias, mask);
  if (counts.defined() && is_training() && !is_recomputing()) {
    const torch::NoGradGuard no_grad;
    counts.add_(result.counts);
  }
  return result;
}

void RouterImpl::update_bias() {
  update_bias([](const Tensor& own) { return own; });
}

void RouterImpl::update_bias(const std::function<Tensor(Tensor)>& sum_over_ranks) {
  TORCH_CHECK_VALUE(bias.defined(), "nn::Router: update_bias: expected a router with a bias_rate above 0");
  const torch::NoGradGuard no_grad;
  const Tensor total = sum_over_ranks(counts.clone());
  // The sign of (mean - count), in integers, so that it does not depend on rounding.
  bias.add_(at::sign(total.sum() - options.experts() * total), options.bias_rate());
  bias.sub_(bias.mean());
  counts.zero_();
}

// Restores the buffers after torch::nn::Module::to(), which converts the dtype of every buffer, including
// integers. The restored tensors are on the device to which the module was moved.
void RouterImpl::keep_buffers(const Tensor& bias_was, const Tensor& counts_was) {
  if (!bias.defined()) return;
  bias.set_data(bias_was.to(bias.device()));
  counts.set_data(counts_was.to(counts.device()));
}

void RouterImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  const Tensor bias_was = bias.defined() ? bias.detach() : bias,
               counts_was = counts.defined() ? counts.detach() : counts;
  Module::to(device, dtype, non_blocking);
  keep_buffers(bias_was, counts_was);
}

void RouterImpl::to(torch::Dtype dtype, bool non_blocking) {
  const Tensor bias_was = bias.defined() ? bias.detach() : bias,
               counts_was = counts.defined() ? counts.detach() : counts;
  Module::to(dtype, non_blocking);
  keep_buffers(bias_was, counts_was);
}

void RouterImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::Router(" << options.features() << ", experts=" << options.experts()
         << ", top_k=" << options.top_k() << ", score=" << options.score()
         << ", renormalize=" << (options.renormalize() ? "true" : "false");
  if (options.groups() > 1)
    stream << ", groups=" << options.groups() << ", top_groups=" << options.top_groups();
  if (options.scale() != 1) stream << ", scale=" << options.scale();
  if (options.bias_rate() > 0) stream << ", bias_rate=" << options.bias_rate();
  stream << ")";
}

}  // namespace shoestring::nn
