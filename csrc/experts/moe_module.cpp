#include <ATen/ops/cat.h>

#include <shoestring/experts/moe.h>

namespace shoestring::nn {

using at::Tensor;

MoEImpl::MoEImpl(const MoEOptions& options) : options(options) {
  TORCH_CHECK_VALUE(options.shared_hidden() >= 0,
                    "nn::MoE: shared_hidden: expected a number of at least 0, received ",
                    options.shared_hidden());
  TORCH_CHECK_VALUE(options.shared_hidden() == 0 || options.activation() != "swigluoai",
                    "nn::MoE: shared_hidden: expected 0 with activation 'swigluoai', which GatedMLP does not "
                    "have, received ",
                    options.shared_hidden());
  TORCH_CHECK_VALUE(
      options.shared_hidden() == 0 || !options.limit().has_value(),
      "nn::MoE: shared_hidden: expected 0 with a limit, which GatedMLP does not have, received ",
      options.shared_hidden());
  reset();
}

void MoEImpl::reset() {
  const MoEOptions& o = options;
  router = register_module("router", Router(RouterOptions(o.features(), o.experts(), o.top_k())
                                                .score(o.score())
                                                .renormalize(o.renormalize())
                                                .groups(o.groups())
                                                .top_groups(o.top_groups())
                                                .scale(o.scale())
                                                .bias_rate(o.bias_rate())));
  experts = register_module("experts", Experts(ExpertsOptions(o.experts(), o.features(), o.hidden())
                                                   .activation(o.activation())
                                                   .limit(o.limit())
                                                   .bias(o.bias())
                                                   .interleaved(o.interleaved())
                                                   .transposed(o.transposed())));
  if (o.shared_hidden() == 0) return;
  const auto mlp = GatedMLPOptions(o.features(), o.shared_hidden()).activation(o.activation()).bias(o.bias());
  shared = register_module("shared", GatedMLP(mlp));
}

std::tuple<Tensor, MoeRoute> MoEImpl::forward(const Tensor& x, const std::optional<Tensor>& mask) {
  MoeRoute route = router(x, mask);
  Tensor y = experts(x, route.index, route.weight);
  if (!shared.is_empty()) y = y + shared(x);
  return {y, std::move(route)};
}

void MoEImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::MoE(" << options.features() << ", hidden=" << options.hidden()
         << ", experts=" << options.experts() << ", top_k=" << options.top_k();
  if (options.shared_hidden() > 0) stream << ", shared_hidden=" << options.shared_hidden();
  stream << ")";
}

MoE upcycle(const GatedMLP& dense, int64_t experts, int64_t top_k) {
  const auto& o = dense->options;
  for (const AdaptableLinear& layer : {dense->gate_proj, dense->up_proj, dense->down_proj}) {
    TORCH_CHECK_VALUE(!layer->is_quantized() && !layer->is_fake_quantized(),
                      "nn::upcycle: dense: expected dense weights, received quantised ones");
    TORCH_CHECK_VALUE(!layer->has_adapter(),
                      "nn::upcycle: dense: expected layers without adapters, received ",
                      layer->adapters.size(), "; call merge() of the layers first");
  }
  MoE moe(MoEOptions(o.features(), o.hidden_features(), experts, top_k)
              .renormalize(true)
              .activation(o.activation())
              .bias(o.bias()));
  const torch::NoGradGuard no_grad;
  const Tensor& like = dense->gate_proj->weight;
  moe->to(like.device(), like.scalar_type());
  moe->train(dense->is_training());
  const auto both = [&](const Tensor& gate, const Tensor& up) { return at::cat({gate, up}); };
  moe->experts->gate_up_proj.copy_(both(like, dense->up_proj->weight));
  moe->experts->down_proj.copy_(dense->down_proj->weight);
  if (o.bias()) {
    moe->experts->gate_up_proj_bias.copy_(both(dense->gate_proj->bias, dense->up_proj->bias));
    moe->experts->down_proj_bias.copy_(dense->down_proj->bias);
  }
  return moe;
}

}  // namespace shoestring::nn
