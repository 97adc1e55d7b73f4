#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <shoestring/adapters/adapter.h>

#include "adapters/config_fields.h"

namespace shoestring::lora {

constexpr const char* kConfig = "adapter_config.json";
constexpr const char* kWeights = "adapter_model.safetensors";
constexpr const char* kPrefix = "base_model.model.";
constexpr const char* kShared = "base_model.";  // prefix of the tensor keys of vera_A and vera_B

/// Settings that the loader reads from adapter_config.json.
struct FileConfig {
  nn::AnyAdapterOptions options;
  std::string bias = "none";
  std::vector<std::string> modules_to_save;
  /// Names in modules_to_save that the module may lack. PEFT lists all heads that the file's task may have.
  std::vector<std::string> heads;
  std::string where;                  // calling function and path of the file; begins error messages
  std::vector<std::string> patterns;  // keys of the field alpha_pattern, in the order of the file
  std::vector<double> alphas;         // values of the field alpha_pattern, in the order of its keys
  // The field feedforward_modules if it is a string, i.e. a regular expression.
  std::optional<std::string> feedforward;
  std::string digest;  // config_digest() of the file

  /// Returns the adapter options of the layer `name`. rank: the rank of the layer's LoRA tensors in the file.
  nn::AnyAdapterOptions layer_options(const std::string& name, int64_t rank) const;
};

/// Returns whether `text` may be a module's name in a file and may be quoted in error messages. It must have
/// at most 1000 bytes, and no characters that a terminal acts on or does not show.
bool is_name(const std::string& text);

/// Reads adapter_config.json. Raises ValueError if the adapter's method or one of its options is not
/// supported; the message names the field.
FileConfig read_config(const std::string& path);

/// Reads adapter_config.json of virtual tokens and returns its config_digest(). Raises ValueError unless the
/// method is `method`, the fields in `sizes` have these values, and every other field is known or off. `op`
/// begins error messages.
std::string read_tokens_config(const std::string& op, const std::string& path, const std::string& method,
                               const std::vector<std::pair<const char*, int64_t>>& sizes);

/// Returns the contents of adapter_config.json for an adapter. The common options are those of the first
/// layer; layers with another rank or alpha are listed by name.
Json to_file(const torch::nn::Module& module,
             const std::vector<std::pair<std::string, nn::AnyAdapterOptions>>& layers,
             const std::string& bias, const std::vector<std::string>& modules_to_save);

/// Returns the ending of the tensor key in PEFT's files for shoestring's parameter name.
std::string file_suffix(const std::string& parameter);
/// Splits a tensor key of a PEFT file, without its prefix, into the layer's name and shoestring's parameter
/// name. Both are empty if the key does not end like an adapter's tensor.
std::pair<std::string, std::string> split_key(const std::string& key);

}  // namespace shoestring::lora
