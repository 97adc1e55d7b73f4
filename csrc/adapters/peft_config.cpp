// Converts between PEFT's adapter_config.json and tensor keys and shoestring's adapter options and parameter
// names.
#include "adapters/peft_config.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>

#include "adapters/names.h"
#include "adapters/pattern.h"
#include "files/read_file.h"
#include "files/safetensors_format.h"

namespace shoestring::lora {
namespace {

// Pairs of the ending of a tensor key in PEFT's files and the parameter name in shoestring.
const std::vector<std::pair<std::string, std::string>> kSuffixes = {
    {"lora_A.weight", "lora_A"},
    {"lora_B.weight", "lora_B"},
    {"lora_B.bias", "lora_bias"},
    {"lora_magnitude_vector", "lora_magnitude_vector"},
    {"lora_embedding_A", "lora_embedding_A"},
    {"lora_embedding_B", "lora_embedding_B"},
    {"ia3_l", "ia3_l"},
    {"vera_lambda_b", "vera_lambda_b"},
    {"vera_lambda_d", "vera_lambda_d"}};

// Fields that Python reads and C++ refuses unless they are off.
const char* const kPythonOnly[] = {"fan_in_fan_out", "target_parameters", "trainable_token_indices",
                                   "ensure_weight_tying"};

// Names of the modules that PEFT trains as a whole for a task.
const std::map<std::string, std::vector<std::string>> kHeads = {{"SEQ_CLS", {"classifier", "score"}},
                                                                {"TOKEN_CLS", {"classifier", "score"}},
                                                                {"QUESTION_ANS", {"qa_outputs"}}};

constexpr size_t kLongestName = 1000;  // maximum length of a module's name, in bytes
// Maximum size of a configuration file, in bytes. Options of a single layer take about 200 bytes.
constexpr int64_t kMaxConfig = 16'000'000;

Json lora_to_file(const std::vector<std::pair<std::string, nn::AnyAdapterOptions>>& layers) {
  const auto& first = std::get<nn::LoraOptions>(layers.front().second);
  Json ranks = Json::object(), alphas = Json::object();
  for (const auto& [name, options] : layers) {
    const auto& layer_options = std::get<nn::LoraOptions>(options);
    TORCH_CHECK_VALUE(
        layer_options.dora() == first.dora() && layer_options.lora_bias() == first.lora_bias() &&
            layer_options.rslora() == first.rslora(),
        "lora::save_adapter: module: expected the same dora, rslora and lora_bias in all layers, since the "
        "file stores one value for all of them, received other values in ",
        name, " than in the first layer");
    if (layer_options.rank() != first.rank()) ranks["^" + name] = layer_options.rank();
    if (layer_options.alpha() != first.alpha()) alphas["^" + name] = layer_options.alpha();
  }
  return {{"peft_type", "LORA"},          {"r", first.rank()},        {"lora_alpha", first.alpha()},
          {"rank_pattern", ranks},        {"alpha_pattern", alphas},  {"lora_dropout", first.dropout()},
          {"use_rslora", first.rslora()}, {"use_dora", first.dora()}, {"lora_bias", first.lora_bias()},
          {"init_lora_weights", true}};
}

}  // namespace

bool is_name(const std::string& text) { return text.size() <= kLongestName && files::is_visible(text); }

// Computes the options of one layer by PEFT's rules. A layer's alpha comes from the first pattern in
// alpha_pattern that matches the layer's whole name or its ending after a dot. If feedforward_modules is a
// string, it is a regular expression for the whole name.
nn::AnyAdapterOptions FileConfig::layer_options(const std::string& name, int64_t rank) const {
  if (const auto* ia3 = std::get_if<nn::IA3Options>(&options)) {
    nn::IA3Options result = *ia3;
    if (!feedforward) return result.feedforward(matches(name, ia3->feedforward_modules()));
    const auto match =
        first_match(where + ": feedforward_modules", {*feedforward}, name, PatternRule::kWhole);
    return result.feedforward(match.index == 0);
  }
  if (!std::holds_alternative<nn::LoraOptions>(options)) return options;
  nn::LoraOptions result = std::get<nn::LoraOptions>(options);
  result.rank(rank);
  const auto match = first_match(where + ": alpha_pattern", patterns, name, PatternRule::kEnding);
  return match.index < 0 ? result : result.alpha(alphas[static_cast<size_t>(match.index)]);
}

FileConfig read_config(const std::string& path) {
  const std::string op = "lora::load_adapter";
  FileConfig config;
  config.where = op + ": " + path;
  const AdapterConfig file(config.where, files::read_text(op, path, kMaxConfig), {"LORA", "IA3", "VERA"});
  for (const char* option : kPythonOnly)
    file.expect(is_off(file[option]), option, "none, since C++ supports nothing else");
  const auto& values = file.options;
  config.digest = file.digest();
  config.bias = values.value("bias", "none");
  config.modules_to_save = values.value("modules_to_save", std::vector<std::string>());
  const auto heads = kHeads.find(values.value("task_type", ""));
  if (heads != kHeads.end()) config.heads = heads->second;
  if (const auto alphas = values.find("alpha_pattern"); alphas != values.end()) {
    for (const auto& item : alphas->items()) {
      config.patterns.push_back(item.key());
      config.alphas.push_back(item.value().get<double>());
    }
  }
  if (file.method == "IA3") {
    const Json& feedforward = file["feedforward_modules"];
    if (feedforward.is_string()) config.feedforward = feedforward.get<std::string>();
    config.options = nn::IA3Options().feedforward_modules(
        feedforward.is_array() ? feedforward.get<std::vector<std::string>>() : std::vector<std::string>());
  } else if (file.method == "VERA") {
    config.options = nn::VeraOptions()
                         .rank(values.value("rank", int64_t{256}))
                         .dropout(values.value("dropout", 0.0))
                         .d_initial(values.value("d_initial", 0.1))
                         .seed(values.value("seed", int64_t{0}))
                         .save_projection(values.value("save_projection", true));
  } else {
    config.options = nn::LoraOptions()
                         .alpha(values.at("alpha").get<double>())
                         .dropout(values.value("dropout", 0.0))
                         .rslora(values.value("rslora", false))
                         .dora(values.value("dora", false))
                         .lora_bias(values.value("lora_bias", false))
                         .init(values.at("init").get<std::string>());
  }
  check_bias(config.where, config.options, config.bias);
  return config;
}

std::string read_tokens_config(const std::string& op, const std::string& path, const std::string& method,
                               const std::vector<std::pair<const char*, int64_t>>& sizes) {
  const AdapterConfig file(op + ": " + path, files::read_text(op, path, kMaxConfig), {method});
  for (const auto& [name, size] : sizes) file.expect(file[name] == size, name, std::to_string(size));
  return file.digest();
}

Json to_file(const torch::nn::Module& module,
             const std::vector<std::pair<std::string, nn::AnyAdapterOptions>>& layers,
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
    config = {{"peft_type", "VERA"},
              {"r", vera->rank()},
              {"vera_dropout", vera->dropout()},
              {"d_initial", vera->d_initial()},
              {"projection_prng_key", vera->seed()},
              {"save_projection", vera->save_projection()}};
  } else if (std::holds_alternative<nn::IA3Options>(first)) {
    auto shortest = shortest_names(module, feedforward);
    const std::set<std::string> known(targets.begin(), targets.end());
    if (std::any_of(shortest.begin(), shortest.end(),
                    [&](const auto& name) { return known.count(name) == 0; })) {
      targets = names;  // PEFT requires the names in feedforward_modules to be in target_modules as well
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
