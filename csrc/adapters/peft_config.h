#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <shoestring/nn/adapter.h>

namespace shoestring::lora {

using Json = nlohmann::json;

constexpr const char* kConfig = "adapter_config.json";
constexpr const char* kWeights = "adapter_model.safetensors";
constexpr const char* kPrefix = "base_model.model.";
constexpr const char* kShared = "base_model.";  // of vera_A and vera_B

/// What adapter_config.json says.
struct FileConfig {
  nn::AnyAdapterOptions options;
  std::string bias = "none";
  std::vector<std::string> modules_to_save;
  std::string place;                       // begins messages
  std::vector<std::string> patterns;       // alpha_pattern, in the order of the file
  std::vector<double> alphas;              // its values
  std::optional<std::string> feedforward;  // feedforward_modules where it is a pattern
  std::string digest;                      // config_digest of the file

  /// A layer's own options. rank: of LoRA's tensors there.
  nn::AnyAdapterOptions own(const std::string& name, int64_t rank) const;
};

/// True for text that may name a module, and that a message may show: without control characters, at most
/// 1000 bytes.
bool is_name(const std::string& text);

/// Raises ValueError for a method or an option that is not supported, by name.
FileConfig read_config(const std::string& path);

/// An adapter's options by layer, as PEFT's; layers that differ from the first are named one by one.
Json to_file(const torch::nn::Module& module,
             const std::vector<std::pair<std::string, nn::AnyAdapterOptions>>& layers,
             const std::string& bias, const std::vector<std::string>& modules_to_save);

/// What the key of a parameter ends with in a file, and the reverse.
std::string file_suffix(const std::string& parameter);
/// The layer and the parameter of a key without prefix; empty where it ends as no parameter does.
std::pair<std::string, std::string> split_key(const std::string& key);

}  // namespace shoestring::lora
