#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

#include <shoestring/core/export.h>
#include <shoestring/core/placeholder.h>

namespace shoestring {

struct LoadOptions {
  /// The format to which load_model quantises the weights of shoestring::nn::AdaptableLinear layers: "none",
  /// "nf4", "fp4", "int4" or "int8". Weights that bitsandbytes has already quantised in the file are loaded
  /// unchanged.
  TORCH_ARG(std::string, quantize) = "none";
  /// Block size of 4-bit weights, and whether their scales are quantised as well (double quantisation).
  TORCH_ARG(int64_t, block_size) = 64;
  TORCH_ARG(bool, double_quant) = false;
  /// Layers that stay dense: full names, or the last components of a name, such as "lm_head".
  TORCH_ARG(std::vector<std::string>, skip) = {};
  /// The dtype of the floating-point tensors that stay dense. The default is the dtype in the file.
  TORCH_ARG(std::optional<at::ScalarType>, dtype) = std::nullopt;
  /// The device on which all loaded tensors are, whatever their device was before. Without a device, each
  /// tensor stays on its own.
  TORCH_ARG(std::optional<at::Device>, device) = std::nullopt;
  /// Tensors that the files may contain although the module does not: full names, or the last components of a
  /// name.
  TORCH_ARG(std::vector<std::string>, ignore) = {};
  /// Called with the name of each tensor as soon as it is loaded, in the order in which the module registers
  /// its parameters, buffers and children. OffloadWeights can take a layer away once its last tensor is
  /// there. If the function throws, the rest of the module stays as it was.
  TORCH_ARG(std::function<void(const std::string&)>, loaded) = nullptr;
};

/// Loads a module's parameters and buffers by name from a safetensors file or a Hugging Face model directory,
/// sharded or not. Tensors are read one at a time (not memory-mapped), copied to their device and quantised
/// there. If the module holds placeholders, neither the host nor the device therefore ever holds the dense
/// model, and with LoadOptions::device the host holds one tensor at a time. Tied parameters have two
/// names; one of the names is enough in the files, and different values for the two raise an error. All names
/// and shapes are checked against the file headers first. A missing, unexpected or misshapen tensor raises an
/// error and leaves the module unchanged.
SHOESTRING_API void load_model(torch::nn::Module& module, const std::string& path,
                               const LoadOptions& options = {});

/// Saves a module's parameters and buffers by name to directory/model.safetensors. Quantised weights are
/// saved under bitsandbytes' keys, and a tensor with several names under its first name. Adapters are not
/// saved; lora::save_adapter saves them. The bytes equal those of Python's safetensors package for the same
/// model. The file replaces an earlier one atomically; the shards and the index of an earlier model are
/// removed afterwards.
SHOESTRING_API void save_model(const torch::nn::Module& module, const std::string& directory);

}  // namespace shoestring
