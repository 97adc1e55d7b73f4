#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/export.h>
#include <shoestring/nn/adapter.h>
#include <shoestring/nn/quantized_linear.h>
#include <shoestring/ops.h>

namespace shoestring::nn {

struct Part;  // not part of the API

struct LinearOptions {
  LinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  /// Weight and bias take no memory until load_model fills them: see shoestring::placeholder.
  TORCH_ARG(bool, placeholder) = false;
};

/// torch::nn::Linear (the same parameters under the same names) that can be quantised and can take on
/// adapters where it stands. A LibTorch module calls the layer its own holder points at, so a layer cannot be
/// replaced from outside: declare `shoestring::nn::Linear` in place of `torch::nn::Linear`, and
/// `shoestring::lora::apply` converts it.
///
/// Several adapters in use are one product: concatenated along the rank, their scaling in lora_B. Several of
/// DoRA add what each of them alone adds to the base.
class SHOESTRING_API LinearImpl : public torch::nn::Cloneable<LinearImpl>, public AdaptedLayer {
 public:
  LinearImpl(int64_t in_features, int64_t out_features)
      : LinearImpl(LinearOptions(in_features, out_features)) {}
  explicit LinearImpl(const LinearOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& x);

  /// Replaces the dense weight by a frozen quantised one, the submodule `base`.
  void quantize(const QuantizeOptions& options = {}, bool nested = false);
  /// Replaces the weight by one that is quantised already: the parts of QuantizedLinearImpl::set_parts.
  /// dtype: what merge() returns to.
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
  /// The base weight in fp32, of an fp64 one in fp64.
  at::Tensor dense_weight() const;
  /// Replaces the base weight's values, in its own form.
  void set_weight(const at::Tensor& dense);
  /// The layer, with its adapters as they are now, is one LoraWeight: its weight is frozen, all rows of the
  /// batch have the same adapters, and they do not multiply the input or have several gains.
  bool is_lora_weight() const;
  /// The layer as lora_linear takes it, DoRA's gain included; nothing where it is more than that.
  std::optional<LoraWeight> lora_weight() const;
  /// Of what lora_A reads now: 0 out of training.
  double dropout() const;

  LinearOptions options;
  at::Tensor weight;  // undefined where quantised
  at::Tensor bias;    // undefined without bias
  QuantizedLinear base{nullptr};

 private:
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
  bool is_one() const;       // but for a trained weight
  LoraWeight plain() const;  // without adapters and bias
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
};
TORCH_MODULE(Linear);

/// The outputs of layers that read one input, such as the projections of query, key and value. Where their
/// weights are frozen, one lora_linear_group, in which the adapters share their dropout's mask; else one
/// layer after the other.
SHOESTRING_API std::vector<at::Tensor> forward_together(const at::Tensor& x,
                                                        const std::vector<Linear>& layers);

/// down(silu(gate(x)) * up(x)), Llama's MLP. Where down's weight is frozen, neither silu nor the product is
/// kept for backward.
SHOESTRING_API at::Tensor swiglu_mlp(const at::Tensor& x, const Linear& gate, const Linear& up,
                                     const Linear& down);

}  // namespace shoestring::nn
