// PEFT's adapter_config.json and keys as our options and names, and the reverse.
#include "lora/peft_config.h"

#include <fstream>
#include <regex>

namespace shoestring::lora {
namespace {

// What keys end with, by what our parameters are called.
const std::vector<std::pair<std::string, std::string>> kSuffixes = {
    {"lora_A.weight", "lora_A"}, {"lora_B.weight", "lora_B"}, {"lora_B.bias", "lora_bias"},
    {"lora_magnitude_vector", "lora_magnitude_vector"}};

// Options of PEFT's that change what an adapter computes; where they are on, the adapter is refused.
const char* const kRefused[] = {"fan_in_fan_out",    "modules_to_save", "layer_replication",       "target_parameters",
                                "use_qalora",        "use_bdlora",      "trainable_token_indices", "kasa_config",
                                "velora_config",     "megatron_config", "alora_invocation_tokens", "monteclora_config",
                                "arrow_config",      "ensure_weight_tying"};

bool is_off(const Json& value) {
  return value.is_null() || value == false || ((value.is_array() || value.is_object()) && value.empty());
}

// A JSON object with checked fields.
class Fields {
 public:
  explicit Fields(const std::string& path) : path_(path) {
    std::ifstream file(path, std::ios::binary);
    TORCH_CHECK_VALUE(file.good(), "lora::load_adapter: ", path, ": expected a file, found none that can be read");
    config_ = Json::parse(file, nullptr, /*allow_exceptions=*/false);
    TORCH_CHECK_VALUE(config_.is_object(), "lora::load_adapter: ", path, ": expected a JSON object, received something else");
  }
  Json operator[](const char* name) const { return config_.value(name, Json()); }
  double number(const char* name, double otherwise) const {
    const Json value = (*this)[name];
    expect(value.is_null() || value.is_number(), name, "a number");
    return value.is_null() ? otherwise : value.get<double>();
  }
  bool flag(const char* name) const {
    const Json value = (*this)[name];
    expect(value.is_null() || value.is_boolean(), name, "true or false");
    return value == true;
  }
  void expect(bool good, const char* name, const char* expected) const {
    TORCH_CHECK_VALUE(good, "lora::load_adapter: ", path_, ": ", name, ": expected ", expected, ", received ", (*this)[name].dump());
  }

 private:
  std::string path_;
  Json config_;
};

}  // namespace

// PEFT's rule: the first pattern that matches the name, or what it ends with after a dot.
double FileConfig::alpha(const std::string& name) const {
  const double otherwise = std::get<nn::AdapterOptions>(options).alpha();
  if (!alphas.is_object()) return otherwise;
  for (const auto& [pattern, value] : alphas.items()) {
    if (!value.is_number()) continue;
    try {
      if (std::regex_match(name, std::regex("(.*\\.)?(" + pattern + ")"))) return value.get<double>();
    } catch (const std::regex_error&) {
      TORCH_CHECK_VALUE(false, "lora::load_adapter: alpha_pattern: expected a regular expression, received ", pattern);
    }
  }
  return otherwise;
}

FileConfig read_config(const std::string& path) {
  const Fields fields(path);
  fields.expect(fields["peft_type"] == "LORA", "peft_type", "LORA");
  for (const char* option : kRefused) fields.expect(is_off(fields[option]), option, "none, since nothing else is supported here");
  const Json bias = fields["bias"];
  fields.expect(bias.is_null() || bias == "none", "bias", "none, since nothing else is supported here");
  FileConfig config;
  config.alphas = fields["alpha_pattern"];
  config.options = nn::AdapterOptions()
                       .alpha(fields.number("lora_alpha", 8))
                       .dropout(fields.number("lora_dropout", 0))
                       .rslora(fields.flag("use_rslora"))
                       .dora(fields.flag("use_dora"))
                       .lora_bias(fields.flag("lora_bias"));
  return config;
}

Json to_file(const std::vector<std::pair<std::string, nn::AnyAdapterOptions>>& layers, const std::vector<std::string>& targets) {
  const auto& first = std::get<nn::AdapterOptions>(layers.front().second);
  Json ranks = Json::object(), alphas = Json::object();
  for (const auto& [name, options] : layers) {
    const auto& own = std::get<nn::AdapterOptions>(options);
    TORCH_CHECK_VALUE(own.dora() == first.dora() && own.lora_bias() == first.lora_bias() && own.rslora() == first.rslora(),
                      "lora::save_adapter: module: expected the same dora, rslora and lora_bias in all layers, since a file has one "
                      "word for all, received ", name, " unlike the first");
    if (own.rank() != first.rank()) ranks["^" + name] = own.rank();
    if (own.alpha() != first.alpha()) alphas["^" + name] = own.alpha();
  }
  return {{"peft_type", "LORA"},
          {"task_type", nullptr},
          {"base_model_name_or_path", nullptr},
          {"r", first.rank()},
          {"lora_alpha", first.alpha()},
          {"lora_dropout", first.dropout()},
          {"target_modules", targets},
          {"rank_pattern", ranks},
          {"alpha_pattern", alphas},
          {"use_rslora", first.rslora()},
          {"use_dora", first.dora()},
          {"bias", "none"},
          {"fan_in_fan_out", false},
          {"lora_bias", first.lora_bias()},
          {"modules_to_save", nullptr},
          {"init_lora_weights", true},
          {"inference_mode", true}};
}

std::string file_suffix(const std::string& parameter) {
  for (const auto& [suffix, name] : kSuffixes) {
    if (name == parameter) return suffix;
  }
  return parameter;
}

std::pair<std::string, std::string> split_key(const std::string& key) {
  for (const auto& [suffix, name] : kSuffixes) {
    if (key.ends_with("." + suffix)) return {key.substr(0, key.size() - suffix.size() - 1), name};
  }
  return {};
}

}  // namespace shoestring::lora
