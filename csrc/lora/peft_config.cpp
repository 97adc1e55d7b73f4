// PEFT's adapter_config.json and keys as our options and names, and the reverse.
#include "lora/peft_config.h"

#include <algorithm>
#include <fstream>
#include <regex>
#include <set>

#include "lora/config_digest.h"
#include "lora/names.h"

namespace shoestring::lora {
namespace {

// What keys end with, by what our parameters are called.
const std::vector<std::pair<std::string, std::string>> kSuffixes = {
    {"lora_A.weight", "lora_A"}, {"lora_B.weight", "lora_B"}, {"lora_B.bias", "lora_bias"},
    {"lora_magnitude_vector", "lora_magnitude_vector"}, {"lora_embedding_A", "lora_embedding_A"},
    {"lora_embedding_B", "lora_embedding_B"}, {"ia3_l", "ia3_l"}, {"vera_lambda_b", "vera_lambda_b"},
    {"vera_lambda_d", "vera_lambda_d"}};

// Options of PEFT's that change what an adapter computes; where they are on, the adapter is refused.
const char* const kRefused[] = {"fan_in_fan_out",    "layer_replication",       "target_parameters", "use_qalora",
                                "use_bdlora",        "trainable_token_indices", "kasa_config",       "velora_config",
                                "megatron_config",   "alora_invocation_tokens", "monteclora_config", "arrow_config",
                                "ensure_weight_tying"};

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
  std::string digest() const { return config_digest(config_); }
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

namespace {

bool fits(const std::string& name, const std::string& pattern, const char* field) {
  try {
    return std::regex_match(name, std::regex(pattern));
  } catch (const std::regex_error&) {
    TORCH_CHECK_VALUE(false, "lora::load_adapter: ", field, ": expected a regular expression, received ", pattern);
  }
}

std::vector<std::string> names_in(const Fields& fields, const char* name) {
  const Json value = fields[name];
  const bool strings = value.is_array() && std::all_of(value.begin(), value.end(), [](const Json& each) { return each.is_string(); });
  fields.expect(value.is_null() || strings, name, "a list of names");
  return value.is_null() ? std::vector<std::string>() : value.get<std::vector<std::string>>();
}

Json lora_to_file(const std::vector<std::pair<std::string, nn::AnyAdapterOptions>>& layers) {
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
  return {{"peft_type", "LORA"},           {"r", first.rank()},           {"lora_alpha", first.alpha()},
          {"rank_pattern", ranks},         {"alpha_pattern", alphas},     {"lora_dropout", first.dropout()},
          {"use_rslora", first.rslora()},  {"use_dora", first.dora()},    {"lora_bias", first.lora_bias()},
          {"init_lora_weights", true}};
}

}  // namespace

// PEFT's rules: of alpha_pattern the first that matches the name, or what it ends with after a dot; a string of
// feedforward_modules is a pattern for the whole name.
nn::AnyAdapterOptions FileConfig::own(const std::string& name, int64_t rank) const {
  if (const auto* ia3 = std::get_if<nn::IA3Options>(&options)) {
    nn::IA3Options result = *ia3;
    const bool pattern = feedforward.is_string();
    return result.feedforward(pattern ? fits(name, feedforward, "feedforward_modules") : matches(name, ia3->feedforward_modules()));
  }
  if (!std::holds_alternative<nn::AdapterOptions>(options)) return options;
  nn::AdapterOptions result = std::get<nn::AdapterOptions>(options);
  result.rank(rank);
  for (const auto& [pattern, value] : alphas.items()) {
    if (value.is_number() && fits(name, "(.*\\.)?(" + pattern + ")", "alpha_pattern")) return result.alpha(value.get<double>());
  }
  return result;
}

FileConfig read_config(const std::string& path) {
  const Fields fields(path);
  const Json method = fields["peft_type"], bias = fields["bias"];
  fields.expect(method == "LORA" || method == "IA3" || method == "VERA", "peft_type", "LORA, IA3 or VERA");
  for (const char* option : kRefused) fields.expect(is_off(fields[option]), option, "none, since nothing else is supported here");
  fields.expect(bias.is_null() || bias.is_string(), "bias", "a name");
  FileConfig config;
  config.digest = fields.digest();
  if (bias.is_string()) config.bias = bias;
  config.modules_to_save = names_in(fields, "modules_to_save");
  config.alphas = fields["alpha_pattern"].is_object() ? fields["alpha_pattern"] : Json::object();
  if (method == "IA3") {
    config.feedforward = fields["feedforward_modules"];
    if (!config.feedforward.is_string()) config.options = nn::IA3Options().feedforward_modules(names_in(fields, "feedforward_modules"));
    else config.options = nn::IA3Options();
  } else if (method == "VERA") {
    config.options = nn::VeraOptions()
                         .rank(static_cast<int64_t>(fields.number("r", 256)))
                         .dropout(fields.number("vera_dropout", 0))
                         .d_initial(fields.number("d_initial", 0.1))
                         .seed(static_cast<int64_t>(fields.number("projection_prng_key", 0)))
                         .save_projection(fields["save_projection"].is_null() || fields.flag("save_projection"));
  } else {
    config.options = nn::AdapterOptions()
                         .alpha(fields.number("lora_alpha", 8))
                         .dropout(fields.number("lora_dropout", 0))
                         .rslora(fields.flag("use_rslora"))
                         .dora(fields.flag("use_dora"))
                         .lora_bias(fields.flag("lora_bias"));
  }
  check_bias("lora::load_adapter: " + path, config.options, config.bias);
  return config;
}

Json to_file(const torch::nn::Module& module, const std::vector<std::pair<std::string, nn::AnyAdapterOptions>>& layers,
             const std::string& bias, const std::vector<std::string>& modules_to_save) {
  std::vector<std::string> names, feedforward;
  for (const auto& [name, options] : layers) {
    names.push_back(name);
    const auto* ia3 = std::get_if<nn::IA3Options>(&options);
    if (ia3 != nullptr && ia3->feedforward()) feedforward.push_back(name);
  }
  auto targets = shortest_names(module, names);
  const auto& first = layers.front().second;
  Json config;
  if (const auto* vera = std::get_if<nn::VeraOptions>(&first)) {
    config = {{"peft_type", "VERA"}, {"r", vera->rank()}, {"vera_dropout", vera->dropout()}, {"d_initial", vera->d_initial()},
              {"projection_prng_key", vera->seed()}, {"save_projection", vera->save_projection()}};
  } else if (std::holds_alternative<nn::IA3Options>(first)) {
    auto shortest = shortest_names(module, feedforward);
    const std::set<std::string> known(targets.begin(), targets.end());
    if (std::any_of(shortest.begin(), shortest.end(), [&](const auto& name) { return known.count(name) == 0; })) {
      targets = names;  // PEFT wants the same names in both
      shortest = feedforward;
    }
    config = {{"peft_type", "IA3"}, {"feedforward_modules", shortest}};
  } else {
    config = lora_to_file(layers);
  }
  config["target_modules"] = targets;
  if (!std::holds_alternative<nn::IA3Options>(first)) config["bias"] = bias;
  config["modules_to_save"] = modules_to_save.empty() ? Json() : Json(modules_to_save);
  for (const char* unknown : {"task_type", "base_model_name_or_path"}) config[unknown] = nullptr;
  config["fan_in_fan_out"] = false;
  config["inference_mode"] = true;
  return config;
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
