// Lists the fields of PEFT's configurations, and reads them for both languages.
#include "adapters/config_fields.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <tuple>

#include <torch/library.h>

#include "adapters/config_digest.h"
#include "adapters/names.h"
#include "adapters/peft_config.h"
#include "files/read_file.h"
#include "files/safetensors_format.h"

namespace shoestring::lora {
namespace {

// Limits on values, because a file may come from an untrusted source. Each name is compared with every
// module, and a name in modules_to_save or target_parameters several times.
constexpr size_t kMostNames = 100'000, kMostModules = 10'000;

bool is_name_in(const Json& value) {
  return value.is_string() && is_name(value.get_ref<const std::string&>());
}
bool is_flag(const Json& value) { return value.is_boolean(); }
bool is_number(const Json& value) { return value.is_number(); }
bool is_integer(const Json& value) {
  // get<int64_t>() would turn a number above the range of int64_t into a negative one.
  return value.is_number_integer() &&
         (!value.is_number_unsigned() || value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
}
template <int64_t most>
bool is_count(const Json& value) {
  return is_integer(value) && value.get<int64_t>() >= 1 && value.get<int64_t>() <= most;
}
template <bool (*fits)(const Json&), size_t most>
bool is_list(const Json& value) {
  return value.is_array() && value.size() <= most && std::all_of(value.begin(), value.end(), fits);
}
template <bool (*fits)(const Json&), size_t most = kMostNames>
bool is_object(const Json& value) {
  return value.is_object() && value.size() <= most && std::all_of(value.begin(), value.end(), fits);
}
bool is_layers(const Json& value) { return is_integer(value) || is_list<is_integer, SIZE_MAX>(value); }
bool is_pattern_or_names(const Json& value) {
  return value.is_string() || is_list<is_name_in, kMostNames>(value);
}
bool is_tokens(const Json& value) {
  return is_list<is_integer, kMostNames>(value) ||
         is_object<is_list<is_integer, kMostNames>, kMostModules>(value);
}

// The type and range of a field's value.
struct FieldCheck {
  bool (*fits)(const Json&);
  const char* expected;
};

constexpr FieldCheck kNumber{is_number, "a finite number"}, kFlag{is_flag, "true or false"},
    kText{is_name_in, "a name"}, kNames{is_pattern_or_names, "a pattern or a list of names"},
    kModules{is_list<is_name_in, kMostModules>, "a list of at most 10000 names"},
    kCount{is_count<INT32_MAX>, "an integer from 1 to 2147483647"},
    // A file of VeRA may omit the matrices vera_A and vera_B. The loader then draws them; at this rank they
    // take 1 GiB each for a layer with 4096 features.
    kVeraRank{is_count<65536>, "an integer from 1 to 65536"},
    kSeed{is_integer, "an integer of at most 64 bits"},
    kRanks{is_object<is_count<INT32_MAX>>, "an object of integers of at least 1"},
    kAlphas{is_object<is_number>, "an object of finite numbers"},
    kTokens{is_tokens, "a list of at most 100000 token ids, or an object of such lists"},
    kLayers{is_layers, "an integer or a list of integers"};

// Methods, as bits.
constexpr int kForLora = 1, kForVera = 2, kForIA3 = 4, kForPrefix = 8, kForPrompt = 16;
constexpr int kForLayers = kForLora | kForVera | kForIA3, kForTokens = kForPrefix | kForPrompt,
              kForAll = kForLayers | kForTokens;

enum class FieldUse {
  kDescribes,  // leaves what the adapter computes as it is; some of these fields are read nevertheless
  kComputes,   // changes what the adapter computes
  kRefused     // changes what the adapter computes and is not supported
};

struct ConfigField {
  const char* name;
  int methods;
  FieldUse use;
  const char* option = "";            // the name of the option in Python; empty if the field is not read
  const FieldCheck* check = nullptr;  // null if the field is not read
};

constexpr ConfigField kConfigFields[] = {
    {"peft_type", kForAll, FieldUse::kComputes},
    {"auto_mapping", kForAll, FieldUse::kDescribes},
    {"base_model_name_or_path", kForAll, FieldUse::kDescribes},
    {"peft_version", kForAll, FieldUse::kDescribes},
    {"revision", kForAll, FieldUse::kDescribes},
    {"task_type", kForAll, FieldUse::kDescribes, "task_type", &kText},
    // PEFT writes true into every file. A loaded adapter is trainable.
    {"inference_mode", kForAll, FieldUse::kDescribes},
    {"target_modules", kForLayers, FieldUse::kComputes, "target_modules", &kNames},
    {"exclude_modules", kForLora | kForIA3, FieldUse::kComputes, "exclude_modules", &kNames},
    {"layers_to_transform", kForLora | kForVera, FieldUse::kComputes, "layers_to_transform", &kLayers},
    {"layers_pattern", kForLora | kForVera, FieldUse::kComputes, "layers_pattern", &kNames},
    {"modules_to_save", kForLayers, FieldUse::kComputes, "modules_to_save", &kModules},
    {"modules_to_save", kForTokens, FieldUse::kRefused},
    {"bias", kForLora | kForVera, FieldUse::kComputes, "bias", &kText},
    {"r", kForLora, FieldUse::kComputes, "rank", &kCount},
    {"r", kForVera, FieldUse::kComputes, "rank", &kVeraRank},
    // follows from the class of each layer
    {"fan_in_fan_out", kForLayers, FieldUse::kDescribes},
    {"lora_alpha", kForLora, FieldUse::kComputes, "alpha", &kNumber},
    {"rank_pattern", kForLora, FieldUse::kComputes, "rank_pattern", &kRanks},
    {"alpha_pattern", kForLora, FieldUse::kComputes, "alpha_pattern", &kAlphas},
    {"use_rslora", kForLora, FieldUse::kComputes, "rslora", &kFlag},
    {"use_dora", kForLora, FieldUse::kComputes, "dora", &kFlag},
    {"lora_dropout", kForLora, FieldUse::kComputes, "dropout", &kNumber},
    {"lora_bias", kForLora, FieldUse::kComputes, "lora_bias", &kFlag},
    {"target_parameters", kForLora, FieldUse::kComputes, "target_parameters", &kModules},
    {"trainable_token_indices", kForLora, FieldUse::kComputes, "trainable_token_indices", &kTokens},
    {"ensure_weight_tying", kForLora, FieldUse::kDescribes, "ensure_weight_tying", &kFlag},
    // Initial values. A file has the trained ones. init_lora_weights is read, because some of its values have
    // changed the base.
    {"init_lora_weights", kForLora, FieldUse::kDescribes},
    {"loftq_config", kForLora, FieldUse::kDescribes},
    {"eva_config", kForLora, FieldUse::kDescribes},
    {"corda_config", kForLora, FieldUse::kDescribes},
    {"lora_ga_config", kForLora, FieldUse::kDescribes},
    // These accompany a refused field, or say how PEFT runs.
    {"megatron_core", kForLora, FieldUse::kDescribes},
    {"qalora_group_size", kForLora, FieldUse::kDescribes},
    {"runtime_config", kForLora, FieldUse::kDescribes},
    {"alora_invocation_tokens", kForLora, FieldUse::kRefused},
    {"arrow_config", kForLora, FieldUse::kRefused},
    {"kasa_config", kForLora, FieldUse::kRefused},
    {"layer_replication", kForLora, FieldUse::kRefused},
    {"megatron_config", kForLora, FieldUse::kRefused},
    {"monteclora_config", kForLora, FieldUse::kRefused},
    {"use_bdlora", kForLora, FieldUse::kRefused},
    {"use_qalora", kForLora, FieldUse::kRefused},
    {"velora_config", kForLora, FieldUse::kRefused},
    {"vera_dropout", kForVera, FieldUse::kComputes, "dropout", &kNumber},
    {"d_initial", kForVera, FieldUse::kComputes, "d_initial", &kNumber},
    {"projection_prng_key", kForVera, FieldUse::kComputes, "seed", &kSeed},
    {"save_projection", kForVera, FieldUse::kComputes, "save_projection", &kFlag},
    {"init_weights", kForVera | kForPrefix, FieldUse::kDescribes},
    {"feedforward_modules", kForIA3, FieldUse::kComputes, "feedforward_modules", &kNames},
    {"init_ia3_weights", kForIA3, FieldUse::kDescribes},
    {"num_virtual_tokens", kForTokens, FieldUse::kComputes, "tokens", &kCount},
    // sizes of the model
    {"num_layers", kForTokens, FieldUse::kDescribes},
    {"num_attention_heads", kForTokens, FieldUse::kDescribes},
    {"num_transformer_submodules", kForTokens, FieldUse::kDescribes},
    {"token_dim", kForTokens, FieldUse::kDescribes},
    {"prefix_projection", kForPrefix, FieldUse::kComputes, "projection", &kFlag},
    {"encoder_hidden_size", kForPrefix, FieldUse::kComputes, "hidden_size", &kCount},
    {"prompt_tuning_init", kForPrompt, FieldUse::kDescribes},
    {"prompt_tuning_init_text", kForPrompt, FieldUse::kDescribes},
    {"tokenizer_kwargs", kForPrompt, FieldUse::kDescribes},
    {"tokenizer_name_or_path", kForPrompt, FieldUse::kDescribes},
};
static_assert(std::none_of(std::begin(kConfigFields), std::end(kConfigFields), [](const ConfigField& field) {
  return field.use == FieldUse::kRefused && field.check != nullptr;
}));

// Bits of the methods, by the value of peft_type.
const std::map<std::string, int> kMethods{{"LORA", kForLora},
                                          {"VERA", kForVera},
                                          {"IA3", kForIA3},
                                          {"PREFIX_TUNING", kForPrefix},
                                          {"PROMPT_TUNING", kForPrompt}};

// Returns the fields that PEFT writes for a method, such as "LORA". A method that is not supported has none.
std::vector<ConfigField> fields_of(const std::string& method) {
  std::vector<ConfigField> fields;
  const auto bits = kMethods.find(method);
  if (bits == kMethods.end()) return fields;
  std::copy_if(std::begin(kConfigFields), std::end(kConfigFields), std::back_inserter(fields),
               [&](const ConfigField& field) { return (field.methods & bits->second) != 0; });
  return fields;
}

// Returns a value as text of one line for an error message, cut after 120 bytes.
std::string shown(const Json& value) {
  constexpr size_t kMost = 120;
  const std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  return text.size() > kMost ? text.substr(0, kMost) + "..." : text;
}

// Returns the initialisation of a LoRA adapter that changed the base weights and that load_adapter computes
// again from them: "pissa" or "olora". Returns "default" for an initialisation that left the base unchanged.
std::string changed_base(const AdapterConfig& file) {
  const char* const name = "init_lora_weights";
  const Json& init = file[name];
  if (init.is_null() || init.is_boolean()) return "default";
  if (init == "pissa" || init == "olora") return init;
  file.expect(
      init == "gaussian" || init == "eva" || init == "orthogonal" || init == "mica", name,
      "an initialisation after which the base weights are known: true, false, 'gaussian', 'eva', "
      "'orthogonal', 'mica', 'pissa' or 'olora'",
      ". Convert the adapter with PEFT's path_initial_model_for_weight_conversion, or merge it there");
  return "default";
}

}  // namespace

bool is_off(const Json& value) {
  return value.is_null() || value == false || (!value.is_primitive() && value.empty());
}

AdapterConfig::AdapterConfig(const std::string& where, const std::string& text,
                             const std::vector<std::string>& methods)
    : where_(where) {
  // For each field that holds a JSON object: the object's keys, in the order of the file.
  std::map<std::string, std::vector<std::string>> keys;
  std::string outer;
  fields_ = files::parse_json(where, text, [&](int depth, const std::string& key) {
    // if the file repeats a field, its last occurrence counts
    if (depth == 1) keys[outer = key].clear();
    if (depth == 2) keys[outer].push_back(key);
  });
  TORCH_CHECK_VALUE(fields_.is_object(), where_, ": expected a JSON object, received ", shown(fields_));
  const Json& type = (*this)["peft_type"];
  expect(std::any_of(methods.begin(), methods.end(), [&](const auto& name) { return type == name; }),
         "peft_type", listed(methods));
  method = type.get<std::string>();
  const auto fields = fields_of(method);
  for (const auto& field : fields) {
    const Json& value = (*this)[field.name];
    // An empty object turns such a field on in PEFT, with the defaults of its options.
    expect(field.use != FieldUse::kRefused || (is_off(value) && !value.is_object()), field.name,
           "null or false, since nothing else is supported here");
  }
  for (const auto& item : fields_.items()) {
    const bool fits =
        is_off(item.value()) || std::any_of(fields.begin(), fields.end(),
                                            [&](const auto& field) { return item.key() == field.name; });
    TORCH_CHECK_VALUE(fits, where_, ": ", files::quote(item.key()),
                      ": expected null, false or an empty value, since this version of shoestring does not "
                      "know the field for ",
                      method, ", received ", shown(item.value()),
                      ". Use a newer version, or remove the field if the adapter does not depend on it");
  }
  if (method == "LORA") options = {{"rank", 8}, {"alpha", 8}, {"init", changed_base(*this)}};
  for (const auto& field : fields) {
    const Json& value = (*this)[field.name];
    if (field.check == nullptr || value.is_null()) continue;
    expect(field.check->fits(value), field.name, field.check->expected);
    if (!value.is_object()) {
      options[field.option] = value;
      continue;
    }
    // operator[] of an object that keeps the order would compare every key with all others.
    nlohmann::ordered_json::object_t ordered;
    for (const auto& key : keys[field.name]) ordered.emplace_back(key, value.at(key));
    options[field.option] = std::move(ordered);
  }
}

const Json& AdapterConfig::operator[](const char* name) const {
  static const Json none;
  const auto field = fields_.find(name);
  return field == fields_.end() ? none : *field;
}

void AdapterConfig::expect(bool good, const char* name, const std::string& expected, const char* hint) const {
  TORCH_CHECK_VALUE(good, where_, ": ", name, ": expected ", expected, ", received ", shown((*this)[name]),
                    hint);
}

std::string AdapterConfig::digest() const { return config_digest(fields_); }

const std::set<std::string>& computing_fields() {
  static const std::set<std::string> names = [] {
    std::set<std::string> computing;
    for (const auto& field : kConfigFields) {
      if (field.use == FieldUse::kComputes) computing.insert(field.name);
    }
    return computing;
  }();
  return names;
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_adapter_config_fields", [](const std::string& method) {
    c10::Dict<std::string, std::string> options;
    for (const auto& field : fields_of(method)) options.insert(field.name, field.option);
    return options;
  });
  m.impl("_read_adapter_config",
         [](const std::string& where, const std::string& text, const std::vector<std::string>& methods) {
           const AdapterConfig file(where, text, methods);
           return std::tuple(file.method, file.options.dump(), file.digest());
         });
}

}  // namespace shoestring::lora
