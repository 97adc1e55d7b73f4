#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <shoestring/core/export.h>

namespace shoestring::nn {

/// Options of LoRA (arXiv 2106.09685) and of its variants.
struct LoraOptions {
  using RankPattern = std::vector<std::pair<std::string, int64_t>>;
  using AlphaPattern = std::vector<std::pair<std::string, double>>;
  /// Rank of the adapter: the number of rows of lora_A and of columns of lora_B.
  TORCH_ARG(int64_t, rank) = 16;
  /// Numerator of the scaling. The low-rank product is multiplied by alpha / rank, or by alpha / sqrt(rank)
  /// with rslora (arXiv 2312.03732).
  TORCH_ARG(double, alpha) = 32;
  /// Other ranks and alphas, by regular expression. An expression must match the name of a layer or its
  /// ending after a dot; the first one that matches counts. lora::apply reads these options, and gives each
  /// layer its own rank and alpha.
  TORCH_ARG(RankPattern, rank_pattern) = {};
  TORCH_ARG(AlphaPattern, alpha_pattern) = {};
  TORCH_ARG(bool, rslora) = false;
  /// Probability of dropping an element of lora_A's input in training. Embeddings ignore it.
  TORCH_ARG(double, dropout) = 0;
  /// DoRA (arXiv 2402.09353): trains the norm of each row of the adapted weight. Dropout applies only to the
  /// input of lora_A. (PEFT computes DoRA's product with the base weight from a second input with dropout.)
  TORCH_ARG(bool, dora) = false;
  /// Adds a trained bias to the low-rank product. The scaling multiplies this bias, too.
  TORCH_ARG(bool, lora_bias) = false;
  /// Initial values of lora_A and lora_B:
  /// - "default": lora_A is kaiming uniform with a = sqrt(5), and lora_B is zero.
  /// - "gaussian": lora_A has standard deviation 1 / rank, and lora_B is zero.
  /// - "pissa" (arXiv 2404.02948), "olora" (arXiv 2406.01775) and "loftq" (arXiv 2310.08659; quantised
  ///   weights only): lora_A and lora_B are computed from the base weight, and their product is subtracted
  ///   from the base weight.
  /// - "pissa_niter_4": as "pissa", with a randomised SVD of 4 iterations.
  TORCH_ARG(std::string, init) = "default";
  /// Number of times that "loftq" alternates between quantising the weight and decomposing the quantisation
  /// error.
  TORCH_ARG(int64_t, loftq_iterations) = 1;

 public:
  /// Returns the factor of the low-rank product: alpha / rank, or alpha / sqrt(rank) with rslora.
  SHOESTRING_API double scaling() const;
  /// Returns whether the initialisation subtracts the initial product of lora_B and lora_A from the base
  /// weight.
  SHOESTRING_API bool changes_base() const;
};

/// Options of IA3 (arXiv 2205.05638): a trained vector multiplies the output of a linear layer.
struct IA3Options {
  /// Names of the layers whose input is multiplied by the trained vector, instead of the output: full names,
  /// or name endings that start after a dot. PEFT selects the second linear layer of an MLP.
  TORCH_ARG(std::vector<std::string>, feedforward_modules) = {};
  /// Used only in the options of a single layer: whether the layer is one of feedforward_modules. lora::apply
  /// sets this option.
  TORCH_ARG(bool, feedforward) = false;
};

/// Options of VeRA (arXiv 2310.11454): trained vectors scale two random matrices that all linear layers
/// share.
struct VeraOptions {
  /// Rank of the adapter: the number of rows of the random matrix vera_A, which all layers share.
  TORCH_ARG(int64_t, rank) = 256;
  /// Probability of dropping an element of vera_A's input in training.
  TORCH_ARG(double, dropout) = 0;
  /// Initial value of every element of vera_lambda_d.
  TORCH_ARG(double, d_initial) = 0.1;
  /// Seed of the random matrices vera_A and vera_B, which all layers share.
  TORCH_ARG(int64_t, seed) = 0;
  /// Whether save_adapter writes the random matrices vera_A and vera_B into the file.
  TORCH_ARG(bool, save_projection) = true;
};

using AnyAdapterOptions = std::variant<LoraOptions, IA3Options, VeraOptions>;

/// One adapter of one layer: its options, and its parameters under their Python names (lora_A, lora_B, ...).
class SHOESTRING_API AdapterImpl : public torch::nn::Cloneable<AdapterImpl> {
 public:
  using Tensors = torch::OrderedDict<std::string, at::Tensor>;

  AdapterImpl(AnyAdapterOptions options, const Tensors& tensors);
  void reset() override;

  /// Returns the adapter's parameter or buffer called `name`. Raises c10::Error if the adapter has none of
  /// that name.
  at::Tensor& operator[](const std::string& name);
  const at::Tensor& operator[](const std::string& name) const;
  bool has(const std::string& name) const { return tensors.contains(name) || fixed.contains(name); }
  /// Stores a buffer of the adapter and replaces a buffer of the same name. VeRA stores vera_A and vera_B. An
  /// initialisation that changes the base weight stores initial_A and initial_B, whose product it subtracted
  /// from the base weight.
  void set_fixed(const std::string& name, const at::Tensor& value);
  /// Returns the options of a LoRA adapter, or null for IA3 and VeRA.
  const LoraOptions* lora() const { return std::get_if<LoraOptions>(&options); }

  AnyAdapterOptions options;
  /// Biases of the base layer that are trained together with this adapter: "none", "all", "lora_only" or
  /// "vera_only".
  std::string bias = "none";
  Tensors tensors;  ///< parameters
  Tensors fixed;    ///< buffers
};
TORCH_MODULE(Adapter);

struct MergeOptions {
  /// Names of the adapters that are added to the weights. An empty list means the adapters in use.
  TORCH_ARG(std::vector<std::string>, adapter_names) = {};
  /// Keep the weights from before the merge and all adapters in memory, so that unmerge can restore them.
  TORCH_ARG(bool, reversible) = true;
  /// Quantise a merged weight again, to the type that it had before the merge. Otherwise the merged weight
  /// becomes dense. The rounding error of quantising again is often larger than the change by a small
  /// adapter.
  TORCH_ARG(bool, requantize) = false;
};

/// Base class of layers that accept adapters. It is not a module by itself. Users call the functions of
/// shoestring/adapters/lora.h, which treat all layers of a model alike.
class SHOESTRING_API AdaptableLayer {
 public:
  using Shapes = torch::OrderedDict<std::string, std::vector<int64_t>>;

  /// Tells which adapters each row of a batch uses.
  struct Rows {
    std::vector<std::string> names;  ///< names of this layer's adapters that at least one row uses
    at::Tensor uses;                 ///< (rows, names): 1 if the row uses the adapter, else 0
  };

  virtual ~AdaptableLayer() = default;

  bool has_adapter() const { return !adapters.is_empty(); }
  bool has_adapter(const std::string& name) const { return adapters.contains(name); }
  /// Returns the names of this layer's adapters that take part in forward.
  std::vector<std::string> current() const;
  /// Returns the current dropout probability of lora_A's input, which all adapters in use share: 0 outside
  /// training. Raises ValueError if they have different ones.
  double dropout() const;

  /// Returns the shape of each parameter that an adapter with these options has in this layer. Raises
  /// ValueError if the layer cannot have such an adapter; `caller` and `name` (of the layer) appear in the
  /// message.
  virtual Shapes shapes(const AnyAdapterOptions& options, const std::string& caller,
                        const std::string& name) const = 0;
  /// Freezes the layer's own parameters, adds an adapter with initial values and makes it the only one in
  /// use. As many random values are drawn as in PEFT, and in the same order. The adapter's parameters are
  /// fp32, or fp64 if the layer's weight is fp64.
  ///
  /// given: lora_A and lora_B whose product has already been subtracted from the base weight, or VeRA's
  /// vera_A and vera_B.
  void add_adapter(const AnyAdapterOptions& options = LoraOptions(),
                   const std::string& adapter_name = "default",
                   AdapterImpl::Tensors given = AdapterImpl::Tensors());
  /// Adds an adapter like add_adapter, but with given values. If the layer has an adapter of that name with
  /// the same shapes, the values are copied into the tensors of that adapter. An adapter of that name with
  /// other shapes is replaced.
  void put_adapter(const std::string& adapter_name, const AnyAdapterOptions& options,
                   const AdapterImpl::Tensors& values);
  /// Removes an adapter. If its initialisation subtracted a product from the base weight, that product is
  /// added back.
  virtual void delete_adapter(const std::string& adapter_name);
  /// Adds adapters to the weight and removes all adapters from the layer. Returns the squared norm of the
  /// rounding error, and the squared norm of the weight's exact change.
  virtual std::array<double, 2> merge(const MergeOptions& options = {}) = 0;
  /// Undoes merge(): restores the weight bit for bit, and restores all adapters.
  virtual void unmerge() = 0;
  virtual bool can_unmerge() const = 0;
  /// Returns the base weight, dense or quantised. Callers use only its device.
  virtual const at::Tensor& base_weight() const = 0;
  /// Returns dtype and device of adapter parameters: fp32 (fp64 if the base weight is fp64), on the device of
  /// the base weight.
  virtual at::TensorOptions adapter_type() const = 0;

  torch::OrderedDict<std::string, Adapter> adapters;
  // Names of the adapters in use in the model; this layer may lack some of them.
  std::vector<std::string> active;
  bool enabled = true;  ///< if false, forward computes the base layer without adapters
  // if set, tells which adapters each row of the batch uses, and `active` is ignored
  std::optional<Rows> rows;
  /// If set, forward calls it with the layer's input. The layer is then not computed together with others.
  std::function<void(const at::Tensor&)> observer;

 protected:
  // Returns the initial values of a new adapter's parameters.
  virtual AdapterImpl::Tensors start(const AnyAdapterOptions& options) const = 0;
  // Prepares the base weight for a new adapter. If the initialisation changes the base weight, subtracts the
  // product of the initial lora_B and lora_A from it and returns these two matrices. For VeRA, returns vera_A
  // and vera_B. Otherwise returns an empty dictionary.
  virtual AdapterImpl::Tensors prepare(const AnyAdapterOptions& options) = 0;
  // Raises ValueError if the layer has adapters of a different kind (LoRA, IA3 or VeRA) than `options`.
  void check_kind(const AnyAdapterOptions& options, const std::string& caller, const std::string& name) const;
  // Freezes the layer's own parameters before a new adapter is added. After that, unmerge is no longer
  // possible.
  virtual void freeze() = 0;
  // Returns a (rows, 1) mask of the rows of x that use the adapter, or an undefined tensor if all rows do.
  at::Tensor uses(const std::string& adapter_name, const at::Tensor& x) const;
  void register_adapters();
  void unregister_adapters();
};

/// Base class of the layers with a dense weight that accept LoRA and DoRA adapters only: embeddings and
/// convolutions. It treats the weight as a matrix (out_features, in_features).
class SHOESTRING_API LowRankLayer : public AdaptableLayer {
 public:
  std::array<double, 2> merge(const MergeOptions& options = {}) override;
  void unmerge() override;
  bool can_unmerge() const override { return former_.has_value(); }
  at::TensorOptions adapter_type() const override;
  const at::Tensor& base_weight() const override { return weight; }

  at::Tensor weight;  ///< the base weight, in the shape that LibTorch's layer gives it
  at::Tensor bias;    ///< (out_features); undefined if the layer has none

 protected:
  // Returns a value in the weight's shape as a matrix (out_features, in_features), and the reverse.
  virtual at::Tensor matrix(const at::Tensor& value) const = 0;
  virtual at::Tensor folded(const at::Tensor& value) const = 0;
  // Returns an adapter's lora_A (rank, in_features) and lora_B (out_features, rank) as matrices.
  virtual std::array<at::Tensor, 2> factors(const AdapterImpl& adapter) const = 0;
  // Registers other tensors as the layer's frozen weight and bias; the bias may be undefined.
  virtual void replace(const at::Tensor& new_weight, const at::Tensor& new_bias) = 0;

  AdapterImpl::Tensors prepare(const AnyAdapterOptions&) override { return AdapterImpl::Tensors(); }
  void freeze() override;
  // Returns DoRA's gain of each output feature: the adapter's magnitude divided by the norm of the feature's
  // row of the adapted matrix. Backward treats the norm as a constant.
  at::Tensor gain(const std::string& adapter_name) const;
  // Adds the changes by the adapters in use to the output `base`, which has no bias. x is the layer's input,
  // `features` the dimension of base with the output features, and product returns the output of an
  // adapter's low-rank product, not scaled.
  at::Tensor composed(const at::Tensor& base, const at::Tensor& x, int64_t features,
                      c10::function_ref<at::Tensor(const AdapterImpl&)> product) const;

  struct Former {
    at::Tensor weight, bias;
    torch::OrderedDict<std::string, Adapter> adapters;
    std::vector<std::string> active;
  };
  std::optional<Former> former_;
};

}  // namespace shoestring::nn
