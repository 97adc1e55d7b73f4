#include "adapters/lora_layers.h"

#include "core/tensors.h"
#include "layers/gated.h"
#include "layers/seeded_dropout.h"
#include "quantization/packed.h"

namespace shoestring::adapters {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace {

void check_float(const char* name, const Tensor& t, c10::Device device) {
  TORCH_CHECK(is_supported_float(t.scalar_type()) && t.device() == device, kLoraLinear, ": ", name,
              ": expected fp32, fp64, bf16 or fp16 on ", device, ", received ", t.scalar_type(), " on ",
              t.device());
}

void check_rows(const char* name, const OptionalTensor& t, const c10::SymInt& rows, c10::Device device) {
  if (!t.has_value()) return;
  check_float(name, *t, device);
  TORCH_CHECK(t->dim() == 1 && t->sym_size(0) == rows, kLoraLinear, ": ", name, ": expected shape (", rows,
              "), received ", t->sym_sizes());
}

void check_layer(const Tensor& x, const LoraLayer& layer) {
  const auto in_features = x.sym_size(-1);
  TORCH_CHECK(layer.lora_A.has_value() == layer.lora_B.has_value(), kLoraLinear,
              ": lora_A and lora_B: expected both or neither, received ",
              layer.lora_A.has_value() ? "lora_A" : "lora_B", " alone");
  if (layer.lora_A.has_value()) {
    const Tensor &A = *layer.lora_A, &B = *layer.lora_B;
    check_float("lora_A", A, x.device());
    check_float("lora_B", B, x.device());
    TORCH_CHECK(A.dim() == 2 && A.sym_size(1) == in_features, kLoraLinear, ": lora_A: expected shape (rank, ",
                in_features, "), received ", A.sym_sizes());
    TORCH_CHECK(B.dim() == 2 && B.sym_size(1) == A.sym_size(0), kLoraLinear,
                ": lora_B: expected shape (out_features, ", A.sym_size(0),
                "), the rank as in lora_A, received ", B.sym_sizes());
  }
  const auto rows = layer.out_features(in_features);
  if (layer.absmax.has_value()) {
    quantization::check_packed(kLoraLinear, layer.weight, *layer.absmax, layer.nested, rows * in_features,
                               layer.quant_type, layer.block_size, x.device());
  } else {
    const Tensor& weight = layer.weight;
    TORCH_CHECK(!layer.nested.has_value(), kLoraLinear,
                ": nested: expected none without absmax, received a tensor");
    TORCH_CHECK(weight.dim() == 2 && weight.sym_size(0) == rows && weight.sym_size(1) == in_features,
                kLoraLinear, ": weight: expected shape (", rows, ", ", in_features, "), received ",
                weight.sym_sizes());
    TORCH_CHECK(weight.scalar_type() == x.scalar_type() && weight.device() == x.device(), kLoraLinear,
                ": weight: expected x's dtype and device, ", x.scalar_type(), " on ", x.device(),
                ", received ", weight.scalar_type(), " on ", weight.device());
  }
  check_rows("bias", layer.bias, rows, x.device());
  check_rows("gain", layer.gain, rows, x.device());
  if (!layer.low_scale.has_value()) return;
  check_float("low_scale", *layer.low_scale, x.device());
  const auto tokens = tokens_of(x);
  TORCH_CHECK(layer.low_scale->dim() == 2 && layer.low_scale->sym_size(0) == tokens &&
                  layer.low_scale->sym_size(1) == layer.rank(),
              kLoraLinear, ": low_scale: expected shape (tokens, rank) = (", tokens, ", ", layer.rank(),
              "), received ", layer.low_scale->sym_sizes());
}

}  // namespace

c10::SymInt tokens_of(const Tensor& x) {
  c10::SymInt tokens = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) tokens = tokens * x.sym_size(i);
  return tokens;
}

std::vector<LoraLayer> lora_layers(const LoraParts& parts, at::ArrayRef<double> scaling,
                                   const c10::List<std::string>& quant_type, at::IntArrayRef block_size) {
  const size_t count = scaling.size();
  TORCH_CHECK(count > 0 && parts.size() == count * kLoraParts && quant_type.size() == count &&
                  block_size.size() == count,
              kLoraLinear, ": layers: expected ", kLoraParts,
              " tensors, a scaling, a quant_type and a block_size for each layer, "
              "received ",
              parts.size(), ", ", count, ", ", quant_type.size(), " and ", block_size.size());
  std::vector<LoraLayer> layers;
  for (size_t i = 0; i < count; ++i) {
    const auto part = [&](LoraPart p) -> OptionalTensor { return parts.get(i * kLoraParts + p); };
    TORCH_CHECK(part(kWeight).has_value(), kLoraLinear, ": weight: expected a tensor, received none");
    layers.push_back({*part(kWeight), part(kAbsmax), part(kNested), part(kBias), part(kLoraA), part(kLoraB),
                      part(kGain), part(kLowScale), scaling[i], quant_type.get(i), block_size[i]});
  }
  return layers;
}

std::vector<LoraLayer> checked_layers(const Tensor& x, const LoraParts& parts, const OptionalTensor& gate,
                                      const OptionalTensor& seed, double dropout,
                                      at::ArrayRef<double> scaling, const c10::List<std::string>& quant_type,
                                      at::IntArrayRef block_size) {
  auto layers = lora_layers(parts, scaling, quant_type, block_size);
  TORCH_CHECK(x.dim() >= 1, kLoraLinear, ": x: expected shape (..., in_features), received a scalar");
  check_float("x", x, x.device());
  layers::check_dropout(kLoraLinear, dropout, seed, x.device());
  if (gate.has_value()) layers::check_gated(kLoraLinear, *gate, x);
  for (const auto& layer : layers) check_layer(x, layer);
  return layers;
}

}  // namespace shoestring::adapters
