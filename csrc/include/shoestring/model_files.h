#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

#include <shoestring/export.h>
#include <shoestring/placeholder.h>

namespace shoestring {

struct LoadOptions {
  /// "none", "nf4", "fp4", "int4" or "int8": what the weights of shoestring::nn::Linear layers become on
  /// arrival. Weights that are quantised in the file, by bitsandbytes' keys, are taken as they are.
  TORCH_ARG(std::string, quantize) = "none";
  /// Of 4-bit weights.
  TORCH_ARG(int64_t, block_size) = 64;
  TORCH_ARG(bool, nested) = false;
  /// Layers that stay dense: names, or what they end with after a dot, such as "lm_head".
  TORCH_ARG(std::vector<std::string>, skip) = {};
  /// Of the floating-point tensors that stay dense. Unset: the file's.
  TORCH_ARG(std::optional<at::ScalarType>, dtype) = std::nullopt;
  /// Tensors that the files may have and the module has not: names, or what they end with after a dot.
  TORCH_ARG(std::vector<std::string>, ignore) = {};
};

/// Fills a module's parameters and buffers by name from a safetensors file or a Hugging Face model directory,
/// sharded or not: read (not mapped) one tensor at a time, quantised as they arrive, so that with
/// placeholders in the module the process never holds the dense model. Parameters that are one tensor under
/// two names (tied embeddings) need one of them. Everything is checked against the files' headers first: a
/// tensor that is missing, surplus or of another shape is an error, and the module stays as it was.
SHOESTRING_API void load_model(torch::nn::Module& module, const std::string& path,
                               const LoadOptions& options = {});

/// Writes directory/model.safetensors: parameters and buffers by name, quantised weights by bitsandbytes'
/// keys, a tensor with several names under the first. Adapters are left out: they are lora::save_adapter's.
/// The bytes are those that Python's safetensors writes for the same model. The file replaces a former one in
/// one step; the shards and the index of a former model are removed after that.
SHOESTRING_API void save_model(const torch::nn::Module& module, const std::string& directory);

}  // namespace shoestring
