#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <shoestring/export.h>
#include <shoestring/ops.h>

namespace shoestring::nn {

/// LoRA (arXiv 2106.09685) and what builds on it.
struct AdapterOptions {
  /// Rows of lora_A and columns of lora_B.
  TORCH_ARG(int64_t, rank) = 16;
  /// The low-rank product is multiplied by alpha / rank, or by alpha / sqrt(rank) with rslora (arXiv
  /// 2312.03732).
  TORCH_ARG(double, alpha) = 32;
  TORCH_ARG(bool, rslora) = false;
  /// Probability of dropping an element of what lora_A reads, in training. Not for embeddings.
  TORCH_ARG(double, dropout) = 0;
  /// DoRA (arXiv 2402.09353): the rows of the adapted weight have trained norms. Dropout does not reach the
  /// weight itself, which PEFT multiplies a second, dropped input with.
  TORCH_ARG(bool, dora) = false;
  /// A bias with the low-rank product, multiplied by the scaling as that is.
  TORCH_ARG(bool, lora_bias) = false;
  /// Of lora_A, lora_B being zero: "default" (kaiming uniform, a = sqrt 5) or "gaussian" (standard deviation
  /// 1 / rank). Of both, the base keeping the rest: "pissa" (arXiv 2404.02948; "pissa_niter_4": by a
  /// randomised SVD of 4 iterations), "olora" (arXiv 2406.01775), "loftq" (arXiv 2310.08659; of a quantised
  /// weight).
  TORCH_ARG(std::string, init) = "default";
  /// Of loftq: how often it quantises and decomposes in turn.
  TORCH_ARG(int64_t, loftq_iterations) = 1;

 public:
  /// What the low-rank product is multiplied by.
  SHOESTRING_API double scaling() const;
  /// The initialisation takes the adapter's part out of the base weight.
  SHOESTRING_API bool changes_base() const;
};

/// IA3 (arXiv 2205.05638): a trained vector that a linear layer's output is multiplied by.
struct IA3Options {
  /// Which of the layers have their input multiplied, not their output: names, or what names end with after a
  /// dot. PEFT's choice is the second product of an MLP.
  TORCH_ARG(std::vector<std::string>, feedforward_modules) = {};
  /// Of one layer's own options: that it is one of these.
  TORCH_ARG(bool, feedforward) = false;
};

/// VeRA (arXiv 2310.11454): trained vectors around two random matrices, which all linear layers share.
struct VeraOptions {
  /// Rows of the shared vera_A.
  TORCH_ARG(int64_t, rank) = 256;
  /// Probability of dropping an element of what vera_A reads, in training.
  TORCH_ARG(double, dropout) = 0;
  /// What vera_lambda_d starts with.
  TORCH_ARG(double, d_initial) = 0.1;
  /// Of the shared matrices.
  TORCH_ARG(int64_t, seed) = 0;
  /// Write these into files, too.
  TORCH_ARG(bool, save_projection) = true;
};

using AnyAdapterOptions = std::variant<AdapterOptions, IA3Options, VeraOptions>;

/// An adapter of one layer: its options, and parameters by their names in Python (lora_A, lora_B, ...).
class SHOESTRING_API AdapterImpl : public torch::nn::Cloneable<AdapterImpl> {
 public:
  using Tensors = torch::OrderedDict<std::string, at::Tensor>;

  AdapterImpl(AnyAdapterOptions options, const Tensors& tensors);
  void reset() override;

  /// A parameter, or one of `fixed`; raises c10::Error where there is none of that name.
  at::Tensor& operator[](const std::string& name);
  const at::Tensor& operator[](const std::string& name) const;
  bool has(const std::string& name) const { return tensors.contains(name) || fixed.contains(name); }
  /// A buffer, in place of one that there may be: vera_A and vera_B; or initial_A and initial_B, which an
  /// initialisation took out of the base.
  void set_fixed(const std::string& name, const at::Tensor& value);
  /// Options of LoRA's kind; null where they are another's.
  const AdapterOptions* lora() const { return std::get_if<AdapterOptions>(&options); }

  AnyAdapterOptions options;
  /// "all" or "lora_only": which biases of the base are trained with it.
  std::string bias = "none";
  Tensors tensors;  // parameters
  Tensors fixed;    // buffers
};
TORCH_MODULE(Adapter);

struct MergeOptions {
  /// Which adapters are added; empty: those in use.
  TORCH_ARG(std::vector<std::string>, adapter_names) = {};
  /// Keep the former weights and all adapters, for unmerge.
  TORCH_ARG(bool, reversible) = true;
  /// A quantised weight is quantised again, in its own form; else it becomes dense. What that rounds away is
  /// often more than a small adapter changed.
  TORCH_ARG(bool, requantize) = false;
};

/// What layers that can take on adapters share. Not a module by itself. Users call the functions of
/// shoestring/lora.h, which keep the layers of a model together.
class SHOESTRING_API AdaptedLayer {
 public:
  using Shapes = torch::OrderedDict<std::string, std::vector<int64_t>>;

  /// A different adapter for each row of the batch.
  struct Rows {
    std::vector<std::string> names;  // the adapters of this layer that a row uses
    at::Tensor uses;                 // (rows, names), 1 where the row uses the adapter
  };

  virtual ~AdaptedLayer() = default;

  bool has_adapter() const { return !adapters.is_empty(); }
  bool has_adapter(const std::string& name) const { return adapters.contains(name); }
  /// The adapters of this layer that take part now.
  std::vector<std::string> current() const;

  /// The shape of each parameter that an adapter with these options has here; raises ValueError where the
  /// layer, called `name`, cannot have such an adapter.
  virtual Shapes shapes(const AnyAdapterOptions& options, const std::string& caller,
                        const std::string& name) const = 0;
  /// Freezes the layer's own parameters and adds an adapter with the values that training begins with (the
  /// number of random values, and their order, are PEFT's), fp32, fp64 over an fp64 weight; it is the one in
  /// use. given: lora_A and lora_B which its initialisation took out of the base already; of VeRA the
  /// matrices vera_A and vera_B.
  void add_adapter(const AnyAdapterOptions& options = AdapterOptions(),
                   const std::string& adapter_name = "default",
                   AdapterImpl::Tensors given = AdapterImpl::Tensors());
  /// The same with given values. An adapter of that name gets them in the tensors that it has, where the
  /// shapes are the same.
  void put_adapter(const std::string& adapter_name, const AnyAdapterOptions& options,
                   const AdapterImpl::Tensors& values);
  /// Takes an adapter off, and its part back into the base where its initialisation took that out.
  virtual void delete_adapter(const std::string& adapter_name);
  /// Adds adapters to the weight and takes all of them off. Returns the squared norms of what rounding lost,
  /// and of the change.
  virtual std::array<double, 2> merge(const MergeOptions& options = {}) = 0;
  /// Undoes merge(): the former weight, bit for bit, and its adapters.
  virtual void unmerge() = 0;
  virtual bool can_unmerge() const = 0;
  /// A tensor of the base, for its device.
  virtual const at::Tensor& base_weight() const = 0;
  /// Of adapters: fp32, or fp64, where the base is.
  virtual at::TensorOptions adapter_type() const = 0;

  torch::OrderedDict<std::string, Adapter> adapters;
  std::vector<std::string> active;  // names of the adapters that are added, in this layer or another
  bool enabled = true;              // false: the base alone
  std::optional<Rows> rows;         // in place of active

 protected:
  // The values that a new adapter starts with.
  virtual AdapterImpl::Tensors start(const AnyAdapterOptions& options) const = 0;
  // Of an initialisation that changes the base its values, after taking them out of the base; of VeRA the
  // matrices; or nothing.
  virtual AdapterImpl::Tensors prepare(const AnyAdapterOptions& options) = 0;
  // Raises ValueError where adapters of another kind are there.
  void check_kind(const AnyAdapterOptions& options, const std::string& caller, const std::string& name) const;
  // Before an adapter comes: what the layer has of its own is not trained, and there is no way back past it.
  virtual void freeze() = 0;
  // Which rows of x use the adapter, (rows, 1); undefined where all do.
  at::Tensor uses(const std::string& adapter_name, const at::Tensor& x) const;
  void register_adapters();
  void unregister_adapters();
};

}  // namespace shoestring::nn
