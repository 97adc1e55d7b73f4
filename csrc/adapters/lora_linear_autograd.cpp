#include <algorithm>
#include <array>
#include <tuple>
#include <type_traits>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "adapters/lora_layers.h"
#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "core/device.h"

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

LoraParts optionals(at::TensorList tensors) {
  LoraParts parts;
  for (const auto& t : tensors) parts.push_back(as_optional(t));
  return parts;
}

// Autograd of lora_linear_group. Saves x once, without conversion, the products of x with lora_A (tokens, sum
// of ranks) and the frozen weights. Saves a layer's output only if its gain needs a gradient.
class LoraLinear : public torch::autograd::Function<LoraLinear> {
 public:
  // tensors: all defined tensors of the layers, because a tensor list of autograd must not contain undefined
  // tensors. places: for each entry of the operator's flat tensor list, its index in `tensors`, or -1 if
  // undefined.
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& gate,
                               at::TensorList tensors, std::vector<int64_t> places,
                               const OptionalTensor& seed, double dropout, std::vector<double> scaling,
                               Names quant_type, std::vector<int64_t> block_size) {
    at::AutoDispatchBelowADInplaceOrView below;
    variable_list parts;
    for (const int64_t place : places) parts.push_back(place < 0 ? Tensor() : tensors[place]);
    static auto op = find<Forward>("shoestring::_lora_linear_group_forward");
    auto [outputs, low] = op.call(x, optionals(parts), gate, seed, dropout, scaling, quant_type, block_size);
    const auto wants = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
    Saved saved{x, gate, low, seed, dropout, wants(x), wants(gate.value_or(Tensor())), {}, {}};
    for (size_t i = 0; i < outputs.size(); ++i) {
      SavedLayer layer;
      std::copy_n(parts.begin() + i * kLoraParts, kLoraParts, layer.parts.begin());
      std::copy_n(places.begin() + i * kLoraParts, kLoraParts, layer.places.begin());
      layer.needed = {wants(layer.parts[kLoraA]), wants(layer.parts[kLoraB]), wants(layer.parts[kGain])};
      if (layer.needed.gain) layer.output = outputs[i];
      layer.bias_needed = wants(layer.parts[kBias]);
      if (layer.bias_needed) layer.bias_type = layer.parts[kBias].scalar_type();
      // Backward reads the bias only for the gradient of the gain.
      if (!layer.needed.gain) layer.parts[kBias] = Tensor();
      layer.scaling = scaling[i];
      layer.quant_type = quant_type.get(i);
      layer.block_size = block_size[i];
      saved.layers.push_back(std::move(layer));
    }
    saved.count = static_cast<int64_t>(saved.layers.size());
    save_fields(ctx, saved);
    ctx->set_materialize_grads(false);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = saved_fields<Saved>(ctx);
    const size_t count = saved.layers.size();
    size_t tensors = 0;
    for (const SavedLayer& layer : saved.layers)
      tensors += std::count_if(layer.places.begin(), layer.places.end(), [](int64_t p) { return p >= 0; });
    // `gradients` has one entry per argument of forward: x, gate, each tensor in `tensors`, and six arguments
    // that have no gradient.
    variable_list gradients(2 + tensors + 6);
    const auto by_part = [&](const SavedLayer& layer, LoraPart part) -> Tensor& {
      return gradients[2 + layer.places[part]];
    };
    {
      at::AutoDispatchBelowADInplaceOrView below;
      const LoraMask needed = saved.mask();
      c10::List<bool> mask;
      bool any = false;
      LoraMask::each(needed, [&](bool each) {
        mask.push_back(each);
        any = any || each;
      });
      if (any) {
        const auto results = LoraGradients::from(saved.gradients(grads, mask), count);
        if (needed.x) gradients[0] = results.x;
        if (needed.gate) gradients[1] = results.gate;
        for (size_t i = 0; i < count; ++i) {
          const SavedLayer& layer = saved.layers[i];
          if (layer.needed.lora_A) by_part(layer, kLoraA) = results.layers[i].lora_A;
          if (layer.needed.lora_B) by_part(layer, kLoraB) = results.layers[i].lora_B;
          if (layer.needed.gain) by_part(layer, kGain) = results.layers[i].gain;
        }
      }
      for (size_t i = 0; i < count; ++i) {
        const SavedLayer& layer = saved.layers[i];
        if (layer.bias_needed && grads[i].defined())
          by_part(layer, kBias) = sum_to_bias(grads[i], layer.bias_type);
      }
    }
    return once_differentiable("lora_linear", std::move(gradients));
  }

 private:
  struct SavedLayer {
    std::array<Tensor, kLoraParts> parts;
    Tensor output;                             // saved only if the gain needs a gradient
    std::array<int64_t, kLoraParts> places{};  // see forward()
    LoraMask::Layer needed;
    bool bias_needed = false;
    at::ScalarType bias_type = at::kFloat;
    double scaling = 1;
    std::string quant_type;
    int64_t block_size = 0;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.parts, self.output, self.places, self.needed.lora_A, self.needed.lora_B,
                 self.needed.gain, self.bias_needed, self.bias_type, self.scaling, self.quant_type,
                 self.block_size);
    }
  };

  struct Saved {
    Tensor x;
    OptionalTensor gate;
    Tensor low;
    OptionalTensor seed;
    double dropout = 0;
    bool wants_x = false, wants_gate = false;
    int64_t count = 0;
    std::vector<SavedLayer> layers;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.x, self.gate, self.low, self.seed, self.dropout, self.wants_x, self.wants_gate,
                 self.count);
      if constexpr (!std::is_const_v<Self>) self.layers.resize(self.count);
      for (auto& layer : self.layers) SavedLayer::fields(layer, visit);
    }

    LoraMask mask() const {
      LoraMask mask(layers.size());
      mask.x = wants_x;
      mask.gate = wants_gate;
      for (size_t i = 0; i < layers.size(); ++i) mask.layers[i] = layers[i].needed;
      return mask;
    }

    // Calls the backward operator.
    std::vector<Tensor> gradients(const variable_list& grads, const c10::List<bool>& mask) const {
      LoraParts parts, outputs;
      std::vector<double> scaling;
      Names quant_type;
      std::vector<int64_t> block_size;
      for (const SavedLayer& layer : layers) {
        for (const Tensor& part : layer.parts) parts.push_back(as_optional(part));
        outputs.push_back(as_optional(layer.output));
        scaling.push_back(layer.scaling);
        quant_type.push_back(layer.quant_type);
        block_size.push_back(layer.block_size);
      }
      static auto op = find<Backward>("shoestring::_lora_linear_group_backward");
      return op.call(optionals(grads), outputs, x, low, parts, gate, seed, dropout, scaling, quant_type,
                     block_size, mask);
    }
  };
};

std::vector<Tensor> autograd(const Tensor& x, const LoraParts& parts, const OptionalTensor& gate,
                             const OptionalTensor& seed, double dropout, at::ArrayRef<double> scaling,
                             const Names& quant_type, at::IntArrayRef block_size) {
  bool recorded = needs_grad(x) || (gate.has_value() && needs_grad(*gate));
  variable_list tensors;
  std::vector<int64_t> places(parts.size(), -1);
  for (size_t i = 0; i < parts.size(); ++i) {
    const OptionalTensor part = parts.get(i);
    if (!part.has_value()) continue;
    places[i] = static_cast<int64_t>(tensors.size());
    tensors.push_back(*part);
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
  return LoraLinear::apply(x, gate, at::TensorList(tensors), places, seed, dropout, scaling.vec(), quant_type,
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
const AutocastRules lora_linear_rules([](torch::Library& m, auto device) {
  m.impl("lora_linear_group", autocast<device>);
});

}  // namespace
}  // namespace shoestring::adapters
