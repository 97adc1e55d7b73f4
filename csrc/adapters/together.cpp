// Computes several linear layers that read the same input by one call of lora_linear_group, or of
// dense_linear_group if all of them are trainable.
#include <algorithm>

#include <shoestring/adapters/adaptable_linear.h>
#include <shoestring/gemm/ops.h>
#include <shoestring/layers/ops.h>

#include "adapters/low_rank.h"

namespace shoestring::nn {

using at::Tensor;

std::vector<Tensor> forward_together(const Tensor& x, const std::vector<AdaptableLinear>& layers) {
  const bool dense = std::all_of(layers.begin(), layers.end(), [](const AdaptableLinear& layer) {
    return !layer->has_adapter() && !layer->is_quantized() && layer->weight.requires_grad();
  });
  if (dense && !layers.empty()) {
    std::vector<Tensor> dense_weights;
    std::vector<std::optional<Tensor>> biases;
    for (const AdaptableLinear& layer : layers) {
      dense_weights.push_back(layer->computed_weight());
      biases.push_back(optional(layer->bias));
    }
    return dense_linear_group(x, dense_weights, biases);
  }
  std::optional<double> dropout;
  bool together = true;
  // checks that all layers can run together before any layer is computed
  for (const AdaptableLinear& layer : layers) {
    together = together && layer->is_lora_weight() &&
               (!layer->has_adapter() || dropout.value_or(layer->dropout()) == layer->dropout());
    if (layer->has_adapter() && together) dropout = layer->dropout();
  }
  std::vector<LoraWeight> weights;
  std::vector<Tensor> outputs;
  for (AdaptableLinear layer : layers) {
    if (together) {
      weights.push_back(*layer->lora_weight());
    } else {
      outputs.push_back(layer(x));
    }
  }
  return together ? lora_linear_group(x, weights, input_with(dropout.value_or(0), x)) : outputs;
}

Tensor swiglu_mlp(const Tensor& x, const AdaptableLinear& gate, const AdaptableLinear& up,
                  const AdaptableLinear& down) {
  const auto outputs = forward_together(x, {gate, up});
  const auto weight = down->lora_weight();
  if (!weight.has_value()) return AdaptableLinear(down)(swiglu(outputs[0], outputs[1]));
  return lora_linear(outputs[1], *weight, input_with(down->dropout(), x).gate(outputs[0]));
}

}  // namespace shoestring::nn
