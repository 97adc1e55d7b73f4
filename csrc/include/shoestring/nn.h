#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <shoestring/export.h>
#include <shoestring/ops.h>

namespace shoestring::nn {

struct QuantizedLinearOptions {
  QuantizedLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  /// quant_type "nf4", "fp4", "int4" or "int8", whose block_size becomes in_features.
  TORCH_ARG(QuantizeOptions, quantize) = {};
  /// Of "nf4" and "fp4": 8-bit scales (double quantisation).
  TORCH_ARG(bool, nested) = false;
};

/// A linear layer over a frozen weight of 4 bits (QLoRA) or int8. The 4-bit bytes are bitsandbytes' flat order, held as
/// (out_features, in_features / 2) where rows are whole blocks, else flat; int8 is (out_features, in_features) with a scale
/// a row. `to(dtype)` leaves them alone.
class SHOESTRING_API QuantizedLinearImpl : public torch::nn::Cloneable<QuantizedLinearImpl> {
 public:
  QuantizedLinearImpl(int64_t in_features, int64_t out_features)
      : QuantizedLinearImpl(QuantizedLinearOptions(in_features, out_features)) {}
  explicit QuantizedLinearImpl(const QuantizedLinearOptions& options);

  /// Draws a weight as torch::nn::Linear does, and quantises it.
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  using torch::nn::Module::to;

  /// (..., in_features) to (..., out_features), in x's dtype.
  at::Tensor forward(const at::Tensor& x);
  /// Takes the values of a dense (out_features, in_features) weight.
  void set_weight(const at::Tensor& dense);
  /// Takes parts that are quantised already, as quantize_4bit (nested: and quantize_absmax) or quantize_int8 returns
  /// them, in any shape; their type becomes the layer's.
  void set_parts(const at::Tensor& bytes, const at::Tensor& scales, const at::Tensor& second,
                 const QuantizeOptions& quantize);
  /// The dense weight: fp32, bf16 or fp16.
  at::Tensor dequantize(at::ScalarType dtype) const;

  QuantizedLinearOptions options;
  at::Tensor packed;  // uint8; int8
  at::Tensor absmax;  // fp32, or uint8 codes where the scales are nested, or int4's int32
  at::Tensor nested;  // undefined, or fp32: see quantize_absmax
  at::Tensor bias;    // undefined without bias
  at::ScalarType dtype = at::kFloat;  // of the dense weight that it was

 private:
  void take(at::Tensor bytes, at::Tensor scales, const at::Tensor& second);
  void keep_parts(const at::Tensor& packed_was, const at::Tensor& absmax_was, const at::Tensor& nested_was);
};
TORCH_MODULE(QuantizedLinear);

struct LinearOptions {
  LinearOptions(int64_t in_features, int64_t out_features) : in_features_(in_features), out_features_(out_features) {}
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  /// Weight and bias take no memory until load_model fills them: see shoestring::placeholder.
  TORCH_ARG(bool, placeholder) = false;
};

struct AdapterOptions {
  TORCH_ARG(int64_t, rank) = 16;
  /// The low-rank product is multiplied by alpha / rank, or by alpha / sqrt(rank) with rslora.
  TORCH_ARG(double, alpha) = 32;
  TORCH_ARG(bool, rslora) = false;
  /// Probability of dropping an element of what lora_A reads, in training.
  TORCH_ARG(double, dropout) = 0;
  /// DoRA (arXiv 2402.09353): the rows of the adapted weight have trained norms. Dropout does not reach the weight itself,
  /// which PEFT multiplies a second, dropped input with.
  TORCH_ARG(bool, dora) = false;
};

/// torch::nn::Linear (the same parameters under the same names) that can be quantised and can take on a LoRA adapter
/// where it stands. A LibTorch module calls the layer its own holder points at, so a layer cannot be replaced from
/// outside: declare `shoestring::nn::Linear` in place of `torch::nn::Linear`, and `shoestring::lora::apply` converts it.
class SHOESTRING_API LinearImpl : public torch::nn::Cloneable<LinearImpl> {
 public:
  LinearImpl(int64_t in_features, int64_t out_features) : LinearImpl(LinearOptions(in_features, out_features)) {}
  explicit LinearImpl(const LinearOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& x);

  /// Replaces the dense weight by a frozen quantised one, the submodule `base`.
  void quantize(const QuantizeOptions& options = {}, bool nested = false);
  /// Replaces the weight by one that is quantised already: the parts of QuantizedLinearImpl::set_parts. dtype: what merge()
  /// returns to.
  void set_quantized(const at::Tensor& bytes, const at::Tensor& scales, const at::Tensor& second,
                     const QuantizeOptions& options, at::ScalarType dtype);
  /// Freezes weight and bias and adds lora_A (kaiming uniform) and lora_B (zero): fp32, fp64 over an fp64 weight.
  void add_adapter(const AdapterOptions& options = {});
  /// Takes on an adapter with given values, in place of one that it may have. magnitude (out_features): of DoRA alone.
  void load_adapter(const AdapterOptions& options, const at::Tensor& lora_A, const at::Tensor& lora_B,
                    const at::Tensor& magnitude = {});
  /// Adds the adapter to the weight, which becomes dense, in the base's dtype. reversible: keeps what unmerge() needs.
  void merge(bool reversible = true);
  /// Undoes merge(): the former weight, bit for bit, and its adapter.
  void unmerge();

  bool is_quantized() const { return !base.is_empty(); }
  bool has_adapter() const { return adapter.has_value(); }
  bool can_unmerge() const { return former_.has_value(); }
  double scaling() const;
  /// The layer as lora_linear takes it, DoRA's gain included; nothing where its weight is trained.
  std::optional<LoraWeight> lora_weight() const;
  /// Of what lora_A reads now: 0 out of training.
  double dropout() const { return has_adapter() && is_training() ? adapter->dropout() : 0; }

  LinearOptions options;
  at::Tensor weight;            // undefined where quantised
  at::Tensor bias;              // undefined without bias
  at::Tensor lora_A, lora_B;    // (rank, in_features), (out_features, rank); undefined without an adapter
  at::Tensor lora_magnitude_vector;  // (out_features); undefined without DoRA
  QuantizedLinear base{nullptr};
  std::optional<AdapterOptions> adapter;

 private:
  struct Former {
    at::Tensor weight, lora_A, lora_B, magnitude;
    QuantizedLinear base{nullptr};
    std::optional<AdapterOptions> adapter;
  };
  void set_adapter(const AdapterOptions& adapter_options, const at::Tensor& A, const at::Tensor& B,
                   const at::Tensor& magnitude);
  void drop_adapter();
  at::TensorOptions adapter_type() const;
  void set_base(const QuantizedLinear& quantized);

  std::optional<Former> former_;
};
TORCH_MODULE(Linear);

/// The outputs of layers that read one input, such as the projections of query, key and value. Where their weights are
/// frozen, one lora_linear_group, in which the adapters share their dropout's mask; else one layer after the other.
SHOESTRING_API std::vector<at::Tensor> forward_together(const at::Tensor& x, const std::vector<Linear>& layers);

struct RMSNormOptions {
  explicit RMSNormOptions(int64_t features) : features_(features) {}
  TORCH_ARG(int64_t, features);
  /// Those of shoestring::RmsNormOptions.
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, offset) = 0.0;
  TORCH_ARG(std::string, casting) = "llama";
};

/// shoestring::rms_norm with a weight, which begins where weight + offset is 1.
class SHOESTRING_API RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  explicit RMSNormImpl(int64_t features) : RMSNormImpl(RMSNormOptions(features)) {}
  explicit RMSNormImpl(const RMSNormOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// (..., features), in x's dtype.
  at::Tensor forward(const at::Tensor& x);
  /// forward(x + residual), and that sum.
  std::tuple<at::Tensor, at::Tensor> forward_with_residual(const at::Tensor& x, const at::Tensor& residual);

  RMSNormOptions options;
  at::Tensor weight;  // (features)
};
TORCH_MODULE(RMSNorm);

struct LayerNormOptions {
  explicit LayerNormOptions(int64_t features) : features_(features) {}
  TORCH_ARG(int64_t, features);
  TORCH_ARG(double, eps) = 1e-5;
  TORCH_ARG(bool, bias) = true;
};

/// shoestring::layer_norm with a weight of ones and, if asked for, a bias of zeros to begin with.
class SHOESTRING_API LayerNormImpl : public torch::nn::Cloneable<LayerNormImpl> {
 public:
  explicit LayerNormImpl(int64_t features) : LayerNormImpl(LayerNormOptions(features)) {}
  explicit LayerNormImpl(const LayerNormOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// (..., features), in x's dtype.
  at::Tensor forward(const at::Tensor& x);

  LayerNormOptions options;
  at::Tensor weight, bias;  // (features); bias: undefined without
};
TORCH_MODULE(LayerNorm);

/// down(silu(gate(x)) * up(x)), Llama's MLP. Where down's weight is frozen, neither silu nor the product is kept for backward.
SHOESTRING_API at::Tensor swiglu_mlp(const at::Tensor& x, const Linear& gate, const Linear& up, const Linear& down);

}  // namespace shoestring::nn
