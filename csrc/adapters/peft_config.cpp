// Converts between PEFT's adapter_config.json and tensor keys and shoestring's adapter options and parameter
// names.
#include "adapters/peft_config.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>

#include "adapters/config_digest.h"
#include "adapters/config_fields.h"
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

// Fields that Python reads and C++ refuses unless they are off. Neither language supports those of
// config_fields().refused.
const char* const kPythonOnly[] = {"fan_in_fan_out", "target_parameters", "trainable_token_indices",
                                   "ensure_weight_tying"};

// Names of the modules that PEFT trains as a whole for a task.
const std::map<std::string, std::vector<std::string>> kHeads = {{"SEQ_CLS", {"classifier", "score"}},
                                                                {"TOKEN_CLS", {"classifier", "score"}},
                                                                {"QUESTION_ANS", {"qa_outputs"}}};

constexpr size_t kLongestName = 1000;  // maximum length of a module's name, in bytes
// Maximum rank of a VeRA adapter in a file. The file may omit the matrices vera_A and vera_B. The loader then
// draws them; at this rank they take 1 GiB each for a layer with 4096 features.
constexpr int64_t kMaxVeraRank = 65536;

bool is_name_in(const Json& value) {
  return value.is_string() && is_name(value.get_ref<const std::string&>());
}

// Returns whether a field is off. PEFT writes its new fields into every file, with such values by default.
bool is_off(const Json& value) {
  return value.is_null() || value == false || (!value.is_primitive() && value.empty());
}

// Returns a value as text of one line for an error message, cut after 120 bytes.
std::string shown(const Json& value) {
  constexpr size_t kMost = 120;
  const std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  return text.size() > kMost ? text.substr(0, kMost) + "..." : text;
}

// The JSON object of a configuration file. Each member function checks the type of the field that it returns.
class Fields {
 public:
  explicit Fields(const std::string& path, const std::string& op = "lora::load_adapter")
      : place_(op + ": " + path) {
    std::string field;
    config_ = files::read_json(op, path, kMaxConfig, [&](int depth, const std::string& key) {
      // if the file repeats a field, its last occurrence counts
      if (depth == 1) keys_[field = key].clear();
      if (depth == 2) keys_[field].push_back(key);
    });
    TORCH_CHECK_VALUE(config_.is_object(), place_, ": expected a JSON object, received something else");
  }

  const Json& operator[](const char* name) const {
    static const Json none;
    const auto found = config_.find(name);
    return found == config_.end() ? none : *found;
  }
  std::string digest() const { return config_digest(config_); }
  double number(const char* name, double otherwise) const {
    const Json& value = (*this)[name];
    expect(value.is_null() || value.is_number(), name, "a number");
    return value.is_null() ? otherwise : value.get<double>();
  }
  int64_t integer(const char* name, int64_t otherwise, int64_t least, int64_t most) const {
    const Json& value = (*this)[name];
    // get<int64_t>() would turn a number above the range of int64_t into a negative one.
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX) &&
                      value.get<int64_t>() >= least && value.get<int64_t>() <= most;
    expect(value.is_null() || fits, name, c10::str("an integer from ", least, " to ", most));
    return value.is_null() ? otherwise : value.get<int64_t>();
  }
  bool flag(const char* name) const {
    const Json& value = (*this)[name];
    expect(value.is_null() || value.is_boolean(), name, "true or false");
    return value == true;
  }
  std::vector<std::string> names(const char* name) const {
    const Json& value = (*this)[name];
    const bool strings = value.is_array() && std::all_of(value.begin(), value.end(), is_name_in);
    expect(value.is_null() || strings, name, "a list of names");
    return value.is_null() ? std::vector<std::string>() : value.get<std::vector<std::string>>();
  }
  // Returns the keys of the JSON object in a field, in the order of the file and without repetitions, like a
  // Python dict.
  std::vector<std::string> keys(const char* name) const {
    std::vector<std::string> result;
    std::set<std::string> seen;
    const auto found = keys_.find(name);
    if (found == keys_.end()) return result;
    for (const auto& key : found->second) {
      if ((*this)[name].contains(key) && seen.insert(key).second) result.push_back(key);
    }
    return result;
  }
  void expect(bool good, const char* name, const std::string& expected) const {
    TORCH_CHECK_VALUE(good, place_, ": ", name, ": expected ", expected, ", received ", shown((*this)[name]));
  }
  // Raises ValueError if a field is on that is refused or that PEFT does not write for the method.
  void check(const std::string& method) const {
    const auto [known, refused] = config_fields(method);
    for (const auto& name : refused) {
      // An empty object turns such a field on in PEFT, with the defaults of its options.
      const bool off = is_off((*this)[name.c_str()]) && !(*this)[name.c_str()].is_object();
      expect(off, name.c_str(), "null or false, since nothing else is supported here");
    }
    for (const auto& item : config_.items()) {
      const bool fits =
          is_off(item.value()) || std::find(known.begin(), known.end(), item.key()) != known.end();
      TORCH_CHECK_VALUE(fits, place_, ": ", files::quote(item.key()),
                        ": expected null, false or an empty value, since this version of shoestring does not "
                        "know the field for ",
                        method, ", received ", shown(item.value()),
                        ". Use a newer version, or remove the field if the adapter does not depend on it");
    }
  }

 private:
  // Maximum size of a configuration file, in bytes. Options of a single layer take about 200 bytes.
  static constexpr int64_t kMaxConfig = 16'000'000;
  std::string place_;
  Json config_;
  // For each field that holds a JSON object: the object's keys, in the order of the file.
  std::map<std::string, std::vector<std::string>> keys_;
};

// Returns the initialisation of a LoRA adapter that changed the base weights and that load_adapter computes
// again from them: "pissa" or "olora". Returns "default" for an initialisation that left the base unchanged.
std::string changed_base(const Fields& fields) {
  const char* const name = "init_lora_weights";
  const Json& init = fields[name];
  if (init.is_null() || init.is_boolean()) return "default";
  if (init == "pissa" || init == "olora") return init;
  fields.expect(init == "gaussian" || init == "eva" || init == "orthogonal" || init == "mica", name,
                "an initialisation after which the base weights are known: true, false, 'gaussian', 'eva', "
                "'orthogonal', 'mica', 'pissa' or 'olora'. Convert the adapter with PEFT's "
                "path_initial_model_for_weight_conversion, or merge it there");
  return "default";
}

Json lora_to_file(const std::vector<std::pair<std::string, nn::AnyAdapterOptions>>& layers) {
  const auto& first = std::get<nn::LoraOptions>(layers.front().second);
  Json ranks = Json::object(), alphas = Json::object();
  for (const auto& [name, options] : layers) {
    const auto& own = std::get<nn::LoraOptions>(options);
    TORCH_CHECK_VALUE(
        own.dora() == first.dora() && own.lora_bias() == first.lora_bias() && own.rslora() == first.rslora(),
        "lora::save_adapter: module: expected the same dora, rslora and lora_bias in all layers, since the "
        "file stores one value for all of them, received other values in ",
        name, " than in the first layer");
    if (own.rank() != first.rank()) ranks["^" + name] = own.rank();
    if (own.alpha() != first.alpha()) alphas["^" + name] = own.alpha();
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
nn::AnyAdapterOptions FileConfig::own(const std::string& name, int64_t rank) const {
  if (const auto* ia3 = std::get_if<nn::IA3Options>(&options)) {
    nn::IA3Options result = *ia3;
    if (!feedforward) return result.feedforward(matches(name, ia3->feedforward_modules()));
    const auto found =
        first_match(place + ": feedforward_modules", {*feedforward}, name, PatternRule::kWhole);
    return result.feedforward(found.index == 0);
  }
  if (!std::holds_alternative<nn::LoraOptions>(options)) return options;
  nn::LoraOptions result = std::get<nn::LoraOptions>(options);
  result.rank(rank);
  const auto found = first_match(place + ": alpha_pattern", patterns, name, PatternRule::kEnding);
  return found.index < 0 ? result : result.alpha(alphas[static_cast<size_t>(found.index)]);
}

FileConfig read_config(const std::string& path) {
  const Fields fields(path);
  const Json &method = fields["peft_type"], &bias = fields["bias"], &alphas = fields["alpha_pattern"];
  fields.expect(method == "LORA" || method == "IA3" || method == "VERA", "peft_type", "LORA, IA3 or VERA");
  fields.check(method);
  for (const char* option : kPythonOnly)
    fields.expect(is_off(fields[option]), option, "none, since C++ supports nothing else");
  fields.expect(bias.is_null() || is_name_in(bias), "bias", "a name");
  FileConfig config;
  config.digest = fields.digest();
  config.place = "lora::load_adapter: " + path;
  if (bias.is_string()) config.bias = bias;
  config.modules_to_save = fields.names("modules_to_save");
  const Json& task = fields["task_type"];
  const auto heads = task.is_string() ? kHeads.find(task.get<std::string>()) : kHeads.end();
  if (heads != kHeads.end()) config.heads = heads->second;
  const bool numbers = alphas.is_object() &&
                       std::all_of(alphas.begin(), alphas.end(), [](const Json& a) { return a.is_number(); });
  fields.expect(alphas.is_null() || numbers, "alpha_pattern", "an object of numbers");
  for (const auto& pattern : fields.keys("alpha_pattern")) {
    config.patterns.push_back(pattern);
    config.alphas.push_back(alphas[pattern].get<double>());
  }
  if (method == "IA3") {
    const Json& feedforward = fields["feedforward_modules"];
    if (feedforward.is_string()) config.feedforward = feedforward.get<std::string>();
    config.options = nn::IA3Options().feedforward_modules(
        config.feedforward ? std::vector<std::string>() : fields.names("feedforward_modules"));
  } else if (method == "VERA") {
    config.options =
        nn::VeraOptions()
            .rank(fields.integer("r", 256, 1, kMaxVeraRank))
            .dropout(fields.number("vera_dropout", 0))
            .d_initial(fields.number("d_initial", 0.1))
            .seed(fields.integer("projection_prng_key", 0, INT64_MIN, INT64_MAX))
            .save_projection(fields["save_projection"].is_null() || fields.flag("save_projection"));
  } else {
    config.options = nn::LoraOptions()
                         .alpha(fields.number("lora_alpha", 8))
                         .dropout(fields.number("lora_dropout", 0))
                         .rslora(fields.flag("use_rslora"))
                         .dora(fields.flag("use_dora"))
                         .lora_bias(fields.flag("lora_bias"))
                         .init(changed_base(fields));
  }
  check_bias(config.place, config.options, config.bias);
  return config;
}

std::string read_tokens_config(const std::string& op, const std::string& path, const std::string& method,
                               const std::vector<std::pair<const char*, int64_t>>& sizes) {
  const Fields fields(path, op);
  fields.expect(fields["peft_type"] == method, "peft_type", method);
  fields.check(method);
  for (const auto& [name, size] : sizes) fields.expect(fields[name] == size, name, std::to_string(size));
  return fields.digest();
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
