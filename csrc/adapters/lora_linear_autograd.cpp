#include <algorithm>
#include <tuple>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "adapters/lora_layers.h"
#include "core/autograd.h"
#include "core/call.h"

namespace shoestring::adapters {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;
using Names = c10::List<std::string>;

using Op = std::vector<Tensor>(const Tensor&, const LoraParts&, const OptionalTensor&, const OptionalTensor&,
                               double, at::ArrayRef<double>, const Names&, at::IntArrayRef);
using Forward = std::tuple<std::vector<Tensor>, Tensor>(const Tensor&, const LoraParts&,
                                                        const OptionalTensor&, const OptionalTensor&, double,
                                                        at::ArrayRef<double>, const Names&, at::IntArrayRef);
using Backward = std::vector<Tensor>(const LoraParts&, const LoraParts&, const Tensor&, const Tensor&,
                                     const LoraParts&, const OptionalTensor&, const OptionalTensor&, double,
                                     at::ArrayRef<double>, const Names&, at::IntArrayRef, c10::List<bool>);

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

LoraParts optionals(at::TensorList tensors) {
  LoraParts parts;
  for (const auto& t : tensors) parts.push_back(optional(t));
  return parts;
}

// Autograd of lora_linear_group. Saves x once, without conversion, the products of x with lora_A (tokens, sum
// of ranks) and the frozen weights. Saves a layer's output only if its gain needs a gradient.
class LoraLinear : public torch::autograd::Function<LoraLinear> {
 public:
  // given: all defined tensors of the layers, because a tensor list of autograd must not contain undefined
  // tensors. places: for each entry of the operator's flat tensor list, its index in `given`, or -1 if
  // undefined.
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& gate,
                               at::TensorList given, std::vector<int64_t> places, const OptionalTensor& seed,
                               double dropout, std::vector<double> scaling, Names quant_type,
                               std::vector<int64_t> block_size) {
    at::AutoDispatchBelowADInplaceOrView below;
    variable_list parts;
    for (const int64_t place : places) parts.push_back(place < 0 ? Tensor() : given[place]);
    static auto op = find<Forward>("shoestring::_lora_linear_group_forward");
    auto [outputs, low] = op.call(x, optionals(parts), gate, seed, dropout, scaling, quant_type, block_size);
    const auto wants = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
    c10::List<bool> mask({wants(x), wants(gate.value_or(Tensor()))}), bias_mask;
    variable_list saved{x, gate.value_or(Tensor()), low, seed.value_or(Tensor())}, kept;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Tensor* layer = parts.data() + i * kLoraParts;
      for (const auto part : {kLoraA, kLoraB, kGain}) mask.push_back(wants(layer[part]));
      bias_mask.push_back(wants(layer[kBias]));
      kept.push_back(wants(layer[kGain]) ? outputs[i] : Tensor());
      // Backward reads the bias only for the gradient of the gain.
      for (size_t part = 0; part < kLoraParts; ++part) {
        saved.push_back(part == kBias && !wants(layer[kGain]) ? Tensor() : layer[part]);
      }
      ctx->saved_data["bias_type" + std::to_string(i)] =
          layer[kBias].defined() ? layer[kBias].scalar_type() : at::kFloat;
    }
    saved.insert(saved.end(), kept.begin(), kept.end());
    ctx->save_for_backward(saved);
    ctx->set_materialize_grads(false);
    ctx->saved_data["places"] = places;
    ctx->saved_data["mask"] = mask;
    ctx->saved_data["bias_mask"] = bias_mask;
    ctx->saved_data["dropout"] = dropout;
    ctx->saved_data["scaling"] = scaling;
    ctx->saved_data["quant_type"] = quant_type;
    ctx->saved_data["block_size"] = block_size;
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto mask = ctx->saved_data["mask"].toBoolList(),
               bias_mask = ctx->saved_data["bias_mask"].toBoolList();
    const size_t count = grads.size(), inputs = 4;
    const at::TensorList parts(saved.data() + inputs, count * kLoraParts);
    const at::TensorList outputs(saved.data() + inputs + count * kLoraParts, count);
    const auto places = ctx->saved_data["places"].toIntVector();
    const auto given = std::count_if(places.begin(), places.end(), [](int64_t place) { return place >= 0; });
    // `gradients` has one entry per argument of forward: x, gate, each tensor in `given`, and six arguments
    // that have no gradient.
    variable_list gradients(2 + given + 6);
    const auto by_part = [&](size_t layer, LoraPart part) -> Tensor& {
      return gradients[2 + places[layer * kLoraParts + part]];
    };
    {
      at::AutoDispatchBelowADInplaceOrView below;
      bool any = false;
      for (const bool wanted : mask) any = any || wanted;
      if (any) {
        static auto op = find<Backward>("shoestring::_lora_linear_group_backward");
        const auto scaling = ctx->saved_data["scaling"].toDoubleVector();
        const auto block_size = ctx->saved_data["block_size"].toIntVector();
        const auto made =
            op.call(optionals(grads), optionals(outputs), saved[0], saved[2], optionals(parts),
                    optional(saved[1]), optional(saved[3]), ctx->saved_data["dropout"].toDouble(), scaling,
                    ctx->saved_data["quant_type"].to<Names>(), block_size, mask);
        for (size_t i = 0; i < 2; ++i) {
          if (mask.get(i)) gradients[i] = made[i];
        }
        for (size_t i = 0; i < count; ++i) {
          for (const auto& [part, from] : {std::pair(kLoraA, 0), std::pair(kLoraB, 1), std::pair(kGain, 2)}) {
            if (mask.get(2 + 3 * i + from)) by_part(i, part) = made[2 + 3 * i + from];
          }
        }
      }
      for (size_t i = 0; i < count; ++i) {
        if (!bias_mask.get(i) || !grads[i].defined()) continue;
        by_part(i, kBias) =
            sum_to_bias(grads[i], ctx->saved_data["bias_type" + std::to_string(i)].toScalarType());
      }
    }
    return once_differentiable("lora_linear", std::move(gradients));
  }
};

std::vector<Tensor> autograd(const Tensor& x, const LoraParts& parts, const OptionalTensor& gate,
                             const OptionalTensor& seed, double dropout, at::ArrayRef<double> scaling,
                             const Names& quant_type, at::IntArrayRef block_size) {
  bool recorded = needs_grad(x) || (gate.has_value() && needs_grad(*gate));
  variable_list given;
  std::vector<int64_t> places(parts.size(), -1);
  for (size_t i = 0; i < parts.size(); ++i) {
    const OptionalTensor part = parts.get(i);
    if (!part.has_value()) continue;
    places[i] = static_cast<int64_t>(given.size());
    given.push_back(*part);
    TORCH_CHECK(!(needs_grad(*part) && i % kLoraParts == kWeight),
                "lora_linear: weight: expected a frozen weight, received one that requires a gradient; call "
                "weight.requires_grad_(False)");
    recorded = recorded || needs_grad(*part);
  }
  if (!recorded) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find<Op>("shoestring::lora_linear_group");
    return op.call(x, parts, gate, seed, dropout, scaling, quant_type, block_size);
  }
  return LoraLinear::apply(x, gate, at::TensorList(given), places, seed, dropout, scaling.vec(), quant_type,
                           block_size.vec());
}

// Casts as autocast does for a linear layer: x and dense weights are converted to the autocast dtype, which
// is also the dtype of the outputs. Adapter tensors keep their dtype, and lora_linear converts them itself.
template <c10::DeviceType device>
std::vector<Tensor> autocast(const Tensor& x, const LoraParts& parts, const OptionalTensor& gate,
                             const OptionalTensor& seed, double dropout, at::ArrayRef<double> scaling,
                             const Names& quant_type, at::IntArrayRef block_size) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto cast = [dtype = at::autocast::get_autocast_dtype(device)](const Tensor& t) {
    return at::autocast::cached_cast(dtype, t, device);
  };
  LoraParts converted = parts.copy();
  for (size_t i = 0; i < parts.size(); i += kLoraParts) {
    const OptionalTensor weight = parts.get(i), absmax = parts.get(i + kAbsmax);
    if (weight.has_value() && !absmax.has_value()) converted.set(i, cast(*weight));
  }
  static auto op = find<Op>("shoestring::lora_linear_group");
  return op.call(cast(x), converted, gate.has_value() ? OptionalTensor(cast(*gate)) : gate, seed, dropout,
                 scaling, quant_type, block_size);
}

TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("lora_linear_group", autograd); }
TORCH_LIBRARY_IMPL(shoestring, AutocastCPU, m) { m.impl("lora_linear_group", autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(shoestring, AutocastCUDA, m) { m.impl("lora_linear_group", autocast<at::kCUDA>); }

}  // namespace
}  // namespace shoestring::adapters
