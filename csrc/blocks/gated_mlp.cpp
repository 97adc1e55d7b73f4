#include <shoestring/blocks/gated_mlp.h>
#include <shoestring/layers/ops.h>

namespace shoestring::nn {

using at::Tensor;

GatedMLPImpl::GatedMLPImpl(const GatedMLPOptions& options) : options(options) {
  const std::string& name = options.activation();
  TORCH_CHECK_VALUE(name == "silu" || name == "gelu" || name == "gelu_tanh",
                    "nn::GatedMLP: activation: expected 'silu', 'gelu' or 'gelu_tanh', received '", name,
                    "'");
  reset();
}

void GatedMLPImpl::reset() {
  const auto linear = [&](int64_t in, int64_t out) {
    return AdaptableLinear(
        AdaptableLinearOptions(in, out).bias(options.bias()).placeholder(options.placeholder()));
  };
  gate_proj = register_module("gate_proj", linear(options.features(), options.hidden_features()));
  up_proj = register_module("up_proj", linear(options.features(), options.hidden_features()));
  down_proj = register_module("down_proj", linear(options.hidden_features(), options.features()));
}

Tensor GatedMLPImpl::forward(const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == options.features(), "nn::GatedMLP: x: expected (..., ",
                    options.features(), "), received ", x.sizes());
  if (options.activation() == "silu") return swiglu_mlp(x, gate_proj, up_proj, down_proj);
  const auto both = forward_together(x, {gate_proj, up_proj});
  return down_proj(geglu(both[0], both[1], options.activation() == "gelu" ? "none" : "tanh"));
}

void GatedMLPImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::GatedMLP(" << options.features() << ", " << options.hidden_features()
         << ", activation=" << options.activation() << ")";
}

}  // namespace shoestring::nn
