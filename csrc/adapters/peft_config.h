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
constexpr const char* kShared = "base_model.";  // prefix of the keys of vera_A and vera_B

/// The settings that adapter_config.json contains.
struct FileConfig {
  nn::AnyAdapterOptions options;
  std::string bias = "none";
  std::vector<std::string> modules_to_save;
  std::string place;                       // caller and path, the start of error messages
  std::vector<std::string> patterns;       // keys of alpha_pattern, in the order of the file
  std::vector<double> alphas;              // values of alpha_pattern
  std::optional<std::string> feedforward;  // feedforward_modules, if it is a pattern
  std::string digest;                      // config_digest of the configuration file

  /// Returns the options of one layer. rank: the rank of the layer's LoRA tensors in the file.
  nn::AnyAdapterOptions own(const std::string& name, int64_t rank) const;
};

/// Returns whether a text may name a module and may appear in an error message: at most 1000 bytes without
/// control characters.
bool is_name(const std::string& text);

/// Reads adapter_config.json. Raises ValueError, with the name of the field, for a method or an option that
/// is not supported.
FileConfig read_config(const std::string& path);

/// Returns the contents of adapter_config.json for an adapter. Layers whose options differ from the first
/// layer's are listed by name.
Json to_file(const torch::nn::Module& module,
             const std::vector<std::pair<std::string, nn::AnyAdapterOptions>>& layers,
             const std::string& bias, const std::vector<std::string>& modules_to_save);

/// Returns the ending of a parameter's key in a file.
std::string file_suffix(const std::string& parameter);
/// Splits a key without prefix into layer and parameter. Both are empty if the key ends like no known
/// parameter.
std::pair<std::string, std::string> split_key(const std::string& key);

}  // namespace shoestring::lora
