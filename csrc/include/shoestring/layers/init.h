#pragma once

// Initial values of weights, and the groups of parameters whose learning rates carry over between widths.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

#include <shoestring/core/export.h>

namespace shoestring::nn::init {

/// Fills a tensor from the normal distribution with `mean` and `std`, cut off outside [a, b], and returns it.
/// The bounds are values, not multiples of std. The same generator gives the values of
/// torch.nn.init.trunc_normal_ in Python. Throws c10::ValueError if std or the bounds do not fit.
SHOESTRING_API at::Tensor trunc_normal_(at::Tensor tensor, double mean = 0, double std = 1, double a = -2,
                                        double b = 2, std::optional<at::Generator> generator = std::nullopt);

/// Divides the parameters that match one of the patterns by sqrt(2 layers), and returns their names. Call it
/// once, after the initialisation, for the output projections of residual branches. A transformer of `layers`
/// blocks has two branches in each block, so that the variance of the residual sum does not grow with depth.
/// Example:
///
///     depth_scaled_(*model, {"*.attention.output.weight", "*.mlp.down.weight"}, 12);
///
/// In a pattern, "*" stands for any text, dots included, "?" for one character, and "[ab]" for one of some
/// characters. Throws c10::ValueError, and changes nothing, if a pattern matches no parameter.
SHOESTRING_API std::vector<std::string> depth_scaled_(torch::nn::Module& module,
                                                      const std::vector<std::string>& patterns,
                                                      int64_t layers);

// ---- muP

/// Parameters of one kind, for muP (maximal update parametrisation, arXiv 2203.03466). r_in and r_out are the
/// fan-in and the fan-out of a parameter as multiples of those in the base model.
///
/// kind      r_in  r_out  rate of Adam  rate of SGD   deviation
/// "input"   1     r      1             r             1
/// "hidden"  r_in  r_out  1 / r_in      r_out / r_in  1 / sqrt(r_in)
/// "output"  r     1      1 / r         1 / r         1 / r
/// "fixed"   1     1      1             1             1
///
/// Embeddings, biases and the weights of norms are "input". The last column is that of r_out >= r_in;
/// otherwise a hidden deviation is sqrt(r_out) / r_in.
struct SHOESTRING_API MupGroup {
  std::string kind;
  /// Multiplies the learning rate of the base model.
  double lr_multiplier = 1;
  /// Multiplies the deviation of the initial values in the base model.
  double std_multiplier = 1;
  std::vector<std::string> names;
  std::vector<at::Tensor> params;
};

struct SHOESTRING_API MupOptions {
  /// "adam" for optimizers whose steps do not depend on the scale of the gradient, "sgd" for SGD.
  TORCH_ARG(std::string, optimizer) = "adam";
  /// "input" or "output" for parameters, by pattern, whose module does not tell it.
  using Kinds = std::map<std::string, std::string>;
  TORCH_ARG(Kinds, kinds);
};

/// Returns the trainable parameters of a module in groups with equal multipliers. The base model has the same
/// parameters in the width whose learning rate is known. The Python counterpart is
/// shoestring.nn.init.mup_groups. Example:
///
///     std::vector<torch::optim::OptimizerParamGroup> groups;
///     for (const auto& g : mup_groups(*model, *base)) {
///       groups.emplace_back(g.params, std::make_unique<AdamWOptions>(1e-3 * g.lr_multiplier));
///     }
///
/// Throws c10::ValueError if names or numbers of dimensions differ, if a parameter has two roles, such as
/// tied embeddings, or if the role of a parameter is not known. MupOptions::kinds then tells it.
SHOESTRING_API std::vector<MupGroup> mup_groups(const torch::nn::Module& module,
                                                const torch::nn::Module& base,
                                                const MupOptions& options = {});
/// Returns the groups without a base model: `base_widths` holds, for each size of a dimension that grows with
/// the width, the size in the base model. All dimensions of this size count.
SHOESTRING_API std::vector<MupGroup> mup_groups_by_size(const torch::nn::Module& module,
                                                        const std::map<int64_t, int64_t>& base_widths,
                                                        const MupOptions& options = {});

/// Scales the initial values of the hidden and output parameters so that their deviations are those of the
/// base model times std_multiplier. The deviations of the base model are measured, so any initialisation
/// fits. Parameters of zeros stay zeros.
SHOESTRING_API void mup_(torch::nn::Module& module, const torch::nn::Module& base,
                         const MupOptions& options = {});

}  // namespace shoestring::nn::init
