#pragma once

#include <string>

#include <shoestring/files/safetensors.h>
#include <torch/nn/module.h>

namespace shoestring::lora {

/// Metadata key in adapter_model.safetensors that holds a description of the base model.
constexpr const char* kBase = "base_model";

/// Describes the frozen dense weights of the base model in JSON: names, shapes and a sample of values of
/// evenly spaced weights. Python writes the same format, with the architecture and a digest of all names.
/// `written`: tensors of the adapter file by name, which replace those of the base.
std::string base_record(const torch::nn::Module& module, const TensorDict& written);

/// Raises ValueError if a weight that base_record() described in `file` has another shape or other values in
/// `module`. Values may differ by the rounding to bf16. Files of PEFT have no description.
void check_base_record(const torch::nn::Module& module, const SafetensorsFile& file);

}  // namespace shoestring::lora
