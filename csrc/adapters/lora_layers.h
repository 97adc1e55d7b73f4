#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

namespace shoestring::adapters {

/// Arguments of lora_linear_group for one layer: its frozen weight, dense or quantised, and its adapter's
/// tensors. The operator takes one flat list, with kLoraParts tensors per layer in the order of the enum
/// LoraPart.
struct LoraLayer {
  at::Tensor weight;
  std::optional<at::Tensor> absmax, nested, bias, lora_A, lora_B, gain, low_scale;
  double scaling;
  std::string quant_type;
  int64_t block_size;

  c10::SymInt rank() const { return lora_A.has_value() ? lora_A->sym_size(0) : c10::SymInt(0); }
  c10::SymInt out_features(const c10::SymInt& in_features) const {
    if (lora_B.has_value()) return lora_B->sym_size(0);
    if (!absmax.has_value()) return weight.sym_size(0);
    const auto codes = weight.sym_numel() * (quant_type == "int8" ? 1 : 2);
    return in_features == 0 ? c10::SymInt(0) : codes / in_features;
  }
};
constexpr size_t kLoraParts = 8;
enum LoraPart { kWeight, kAbsmax, kNested, kBias, kLoraA, kLoraB, kGain, kLowScale };

using LoraParts = c10::List<std::optional<at::Tensor>>;

/// One value for each input of lora_linear_group that can have a gradient. The backward operator takes a mask
/// of these inputs and returns their gradients as flat lists, in the order of each().
template <class T>
struct LoraInputs {
  struct Layer {
    T lora_A{}, lora_B{}, gain{};
  };

  explicit LoraInputs(size_t count) : layers(count) {}

  template <class Self, class Visit>
  static void each(Self& self, Visit visit) {
    visit(self.x);
    visit(self.gate);
    for (auto& layer : self.layers) {
      visit(layer.lora_A);
      visit(layer.lora_B);
      visit(layer.gain);
    }
  }
  template <class List>
  static LoraInputs from(const List& list, size_t count) {
    LoraInputs inputs(count);
    size_t next = 0;
    each(inputs, [&](T& value) { value = list[next++]; });
    return inputs;
  }

  T x{}, gate{};
  std::vector<Layer> layers;
};
using LoraMask = LoraInputs<bool>;
using LoraGradients = LoraInputs<at::Tensor>;

constexpr const char* kLoraLinear = "lora_linear";  // operator name in error messages

/// Splits the flat tensor list of lora_linear_group into layers.
std::vector<LoraLayer> lora_layers(const LoraParts& parts, at::ArrayRef<double> scaling,
                                   const c10::List<std::string>& quant_type, at::IntArrayRef block_size);

/// Splits the flat tensor list of lora_linear_group into layers. Raises for tensors whose shape, dtype or
/// device does not fit x or the other arguments.
std::vector<LoraLayer> checked_layers(const at::Tensor& x, const LoraParts& parts,
                                      const std::optional<at::Tensor>& gate,
                                      const std::optional<at::Tensor>& seed, double dropout,
                                      at::ArrayRef<double> scaling, const c10::List<std::string>& quant_type,
                                      at::IntArrayRef block_size);

/// Returns the number of tokens in x (..., in_features): the product of all sizes except the last.
c10::SymInt tokens_of(const at::Tensor& x);

}  // namespace shoestring::adapters
