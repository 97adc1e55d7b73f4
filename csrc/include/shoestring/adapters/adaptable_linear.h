#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/adapters/adapter.h>
#include <shoestring/adapters/ops.h>
#include <shoestring/core/export.h>
#include <shoestring/quantization/ops.h>
#include <shoestring/quantization/quantized_linear.h>

namespace shoestring::nn {

struct Part;  // internal type, not part of the API

struct AdaptableLinearOptions {
  AdaptableLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  /// Weight and bias allocate no memory until load_model fills them; see shoestring::placeholder.
  TORCH_ARG(bool, placeholder) = false;
};

/// torch::nn::Linear, with the same parameter names, that can be quantised and accepts adapters. A LibTorch
/// module holds its layers in its own members, so no function can replace a layer from outside. Declare
/// `shoestring::nn::AdaptableLinear` instead of `torch::nn::Linear`; `shoestring::lora::apply` then converts
/// the layer in place.
///
/// Several LoRA adapters in use are computed as one low-rank product: their matrices are concatenated along
/// the rank, and each lora_B is multiplied by its scaling. With several DoRA adapters in use, the layer adds
/// up the change that each one alone makes to the base weight.
class SHOESTRING_API AdaptableLinearImpl : public torch::nn::Cloneable<AdaptableLinearImpl>,
                                           public AdaptableLayer {
 public:
  AdaptableLinearImpl(int64_t in_features, int64_t out_features)
      : AdaptableLinearImpl(AdaptableLinearOptions(in_features, out_features)) {}
  explicit AdaptableLinearImpl(const AdaptableLinearOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& x);

  /// Replaces the dense weight with a frozen quantised weight in the submodule `base`.
  void quantize(const QuantizeOptions& options = {}, bool double_quant = false);
  /// Prepares the layer for quantisation-aware training: forward computes with shoestring::fake_quantize of
  /// the weight, which stays dense and trainable. The gradient of the weight is straight-through.
  void fake_quantize(const QuantizeOptions& options = {}, bool double_quant = false);
  /// Ends quantisation-aware training: quantises the weight with the options of fake_quantize. The
  /// dequantised weight equals, bit for bit, the one with which forward has computed.
  void convert_quantized();
  /// Replaces the weight with a weight that is already quantised, given as in QuantizedLinearImpl::set_parts.
  /// `dtype` is the dtype of the dense weight after merge().
  void set_quantized(const at::Tensor& bytes, const at::Tensor& scales, const at::Tensor& second,
                     const QuantizeOptions& options, at::ScalarType dtype);

  Shapes shapes(const AnyAdapterOptions& options, const std::string& caller,
                const std::string& name) const override;
  void delete_adapter(const std::string& adapter_name) override;
  std::array<double, 2> merge(const MergeOptions& options = {}) override;
  void unmerge() override;
  bool can_unmerge() const override { return former_.has_value(); }
  at::TensorOptions adapter_type() const override;
  const at::Tensor& base_weight() const override { return is_quantized() ? base->packed : weight; }

  bool is_quantized() const { return !base.is_empty(); }
  bool is_fake_quantized() const { return fake_.has_value(); }
  /// Returns the dense weight with which forward computes: `weight`, or its fake-quantised values. The layer
  /// must not be quantised.
  at::Tensor computed_weight() const;
  /// Returns the base weight as fp32, or as fp64 if the weight is fp64.
  at::Tensor dense_weight() const;
  /// Replaces the values of the base weight and keeps its dtype or quantised type.
  void set_weight(const at::Tensor& dense);
  /// Returns whether one LoraWeight describes the layer with its current adapters. The weight must be frozen,
  /// and all rows of the batch must use the same adapters. A DoRA adapter must be the only one in use, and no
  /// IA3 adapter may multiply the input.
  bool is_lora_weight() const;
  /// Returns the arguments of this layer for lora_linear, with DoRA's gain, or nullopt if !is_lora_weight().
  std::optional<LoraWeight> lora_weight() const;

  AdaptableLinearOptions options;
  at::Tensor weight;  ///< dense weight; undefined if the layer is quantised
  at::Tensor bias;    ///< (out_features); undefined if options.bias() is false
  QuantizedLinear base{nullptr};

 private:
  // Format to which convert_quantized will quantise the weight.
  struct Fake {
    QuantizeOptions quantize;
    bool double_quant;
  };
  struct Former {
    at::Tensor weight, bias;
    QuantizedLinear base{nullptr};
    torch::OrderedDict<std::string, Adapter> adapters;
    std::vector<std::string> active;
  };
  AdapterImpl::Tensors start(const AnyAdapterOptions& adapter_options) const override;
  AdapterImpl::Tensors prepare(const AnyAdapterOptions& adapter_options) override;
  void freeze() override;
  void set_base(const QuantizedLinear& quantized);
  void set_dense(const at::Tensor& value);
  void set_bias(const at::Tensor& value);
  // Returns whether one LoraWeight describes the layer. Unlike is_lora_weight(), does not require a frozen
  // weight.
  bool is_one() const;
  LoraWeight plain() const;  // returns the base weight alone, without adapters and bias
  LoraWeight joined() const;
  Part part(const std::string& adapter_name) const;
  at::Tensor gain(const std::string& adapter_name) const;
  std::array<at::Tensor, 2> vectors(const std::vector<std::string>& names) const;
  bool has_several_gains() const;
  at::Tensor summed_bias(const std::vector<std::string>& names) const;
  at::Tensor forward_rows(const at::Tensor& x) const;
  at::Tensor forward_gains(const at::Tensor& x) const;
  std::vector<Part> parts(const std::vector<std::string>& names, const at::Tensor& x = {}) const;
  AdapterImpl::Tensors merged(const std::vector<std::string>& names) const;

  std::optional<Former> former_;
  std::optional<Fake> fake_;
};
TORCH_MODULE(AdaptableLinear);

/// Computes several layers that read the same input, such as the projections of query, key and value. If all
/// their weights are frozen, the layers are computed by one call of lora_linear_group, and their adapters
/// share one dropout mask. Otherwise the layers run one after the other.
SHOESTRING_API std::vector<at::Tensor> forward_together(const at::Tensor& x,
                                                        const std::vector<AdaptableLinear>& layers);

/// Computes down(silu(gate(x)) * up(x)), Llama's MLP. If the weight of `down` is frozen, silu(gate(x)) and
/// silu(gate(x)) * up(x) are not saved for backward.
SHOESTRING_API at::Tensor swiglu_mlp(const at::Tensor& x, const AdaptableLinear& gate,
                                     const AdaptableLinear& up, const AdaptableLinear& down);

}  // namespace shoestring::nn
