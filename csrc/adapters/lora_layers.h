#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

namespace shoestring::adapters {

/// One layer of lora_linear_group: a frozen weight, dense or quantised, and the tensors of its adapter. The
/// operator takes all layers as one flat list, with kLoraParts tensors per layer in the order of LoraPart.
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

constexpr const char* kLoraLinear = "lora_linear";  // name of the operator in error messages

/// Splits the flat list of the operator's tensors into layers.
std::vector<LoraLayer> lora_layers(const LoraParts& parts, at::ArrayRef<double> scaling,
                                   const c10::List<std::string>& quant_type, at::IntArrayRef block_size);

/// Does the same as lora_layers, and raises for tensors that do not fit x and the other arguments.
std::vector<LoraLayer> checked_layers(const at::Tensor& x, const LoraParts& parts,
                                      const std::optional<at::Tensor>& gate,
                                      const std::optional<at::Tensor>& seed, double dropout,
                                      at::ArrayRef<double> scaling, const c10::List<std::string>& quant_type,
                                      at::IntArrayRef block_size);

/// Returns the product of all sizes of x except the last.
c10::SymInt tokens_of(const at::Tensor& x);

}  // namespace shoestring::adapters
