#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <shoestring/export.h>
#include <shoestring/nn.h>

namespace shoestring::lora {

struct LoraOptions {
  TORCH_ARG(nn::AdapterOptions, adapter) = {};
  /// Names of layers, or what names end with after a dot (PEFT's rule). Empty: every shoestring::nn::Linear.
  TORCH_ARG(std::vector<std::string>, target_modules) = {};
  /// "none", "nf4", "fp4", "int4" or "int8": every shoestring::nn::Linear, with an adapter or without, gets such a weight.
  TORCH_ARG(std::string, quantize) = "none";
  /// Of 4-bit weights.
  TORCH_ARG(int64_t, block_size) = 64;
  TORCH_ARG(bool, nested) = false;
};

/// Freezes a module's parameters and gives its shoestring::nn::Linear layers trainable adapters, in place. Declare what
/// shall stay as it is, such as an output head, as torch::nn::Linear. Returns the names of the layers with an adapter.
SHOESTRING_API std::vector<std::string> apply(torch::nn::Module& module, const LoraOptions& options = {});

/// Adds every adapter to its weight. reversible: keep the former weights for unmerge().
SHOESTRING_API void merge(torch::nn::Module& module, bool reversible = true);
SHOESTRING_API void unmerge(torch::nn::Module& module);

/// Writes adapter_config.json and adapter_model.safetensors, as PEFT does. The module's names are the model's.
SHOESTRING_API void save_adapter(const torch::nn::Module& module, const std::string& directory);

/// Puts a LoRA adapter from PEFT, or from save_adapter, onto a module, also one without adapters. Nothing is changed
/// unless all of the file fits.
SHOESTRING_API void load_adapter(torch::nn::Module& module, const std::string& directory);

}  // namespace shoestring::lora
