// Lists the fields of PEFT's configurations. Both languages refuse a file with a field that is not listed,
// unless the value of the field says that it is off.
#include "adapters/config_fields.h"

#include <map>
#include <tuple>

#include <torch/library.h>

namespace shoestring::lora {
namespace {

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
};

constexpr ConfigField kConfigFields[] = {
    {"peft_type", kForAll, FieldUse::kComputes},
    {"auto_mapping", kForAll, FieldUse::kDescribes},
    {"base_model_name_or_path", kForAll, FieldUse::kDescribes},
    {"peft_version", kForAll, FieldUse::kDescribes},
    {"revision", kForAll, FieldUse::kDescribes},
    {"task_type", kForAll, FieldUse::kDescribes},
    // PEFT writes true into every file. A loaded adapter is trainable.
    {"inference_mode", kForAll, FieldUse::kDescribes},
    {"target_modules", kForLayers, FieldUse::kComputes},
    {"exclude_modules", kForLora | kForIA3, FieldUse::kComputes},
    {"layers_to_transform", kForLora | kForVera, FieldUse::kComputes},
    {"layers_pattern", kForLora | kForVera, FieldUse::kComputes},
    {"modules_to_save", kForLayers, FieldUse::kComputes},
    {"modules_to_save", kForTokens, FieldUse::kRefused},
    {"bias", kForLora | kForVera, FieldUse::kComputes},
    {"r", kForLora | kForVera, FieldUse::kComputes},
    // follows from the class of each layer
    {"fan_in_fan_out", kForLayers, FieldUse::kDescribes},
    {"lora_alpha", kForLora, FieldUse::kComputes},
    {"rank_pattern", kForLora, FieldUse::kComputes},
    {"alpha_pattern", kForLora, FieldUse::kComputes},
    {"use_rslora", kForLora, FieldUse::kComputes},
    {"use_dora", kForLora, FieldUse::kComputes},
    {"lora_dropout", kForLora, FieldUse::kComputes},
    {"lora_bias", kForLora, FieldUse::kComputes},
    {"target_parameters", kForLora, FieldUse::kComputes},
    {"trainable_token_indices", kForLora, FieldUse::kComputes},
    {"ensure_weight_tying", kForLora, FieldUse::kDescribes},
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
    {"vera_dropout", kForVera, FieldUse::kComputes},
    {"d_initial", kForVera, FieldUse::kComputes},
    {"projection_prng_key", kForVera, FieldUse::kComputes},
    {"save_projection", kForVera, FieldUse::kComputes},
    {"init_weights", kForVera | kForPrefix, FieldUse::kDescribes},
    {"feedforward_modules", kForIA3, FieldUse::kComputes},
    {"init_ia3_weights", kForIA3, FieldUse::kDescribes},
    {"num_virtual_tokens", kForTokens, FieldUse::kComputes},
    // sizes of the model
    {"num_layers", kForTokens, FieldUse::kDescribes},
    {"num_attention_heads", kForTokens, FieldUse::kDescribes},
    {"num_transformer_submodules", kForTokens, FieldUse::kDescribes},
    {"token_dim", kForTokens, FieldUse::kDescribes},
    {"prefix_projection", kForPrefix, FieldUse::kComputes},
    {"encoder_hidden_size", kForPrefix, FieldUse::kComputes},
    {"prompt_tuning_init", kForPrompt, FieldUse::kDescribes},
    {"prompt_tuning_init_text", kForPrompt, FieldUse::kDescribes},
    {"tokenizer_kwargs", kForPrompt, FieldUse::kDescribes},
    {"tokenizer_name_or_path", kForPrompt, FieldUse::kDescribes},
};

}  // namespace

ConfigFields config_fields(const std::string& method) {
  static const std::map<std::string, int> methods{{"LORA", kForLora},
                                                  {"VERA", kForVera},
                                                  {"IA3", kForIA3},
                                                  {"PREFIX_TUNING", kForPrefix},
                                                  {"PROMPT_TUNING", kForPrompt}};
  const auto own = methods.find(method);
  ConfigFields fields;
  for (const auto& field : kConfigFields) {
    if (own == methods.end() || (field.methods & own->second) == 0) continue;
    fields.known.emplace_back(field.name);
    if (field.use == FieldUse::kRefused) fields.refused.emplace_back(field.name);
  }
  return fields;
}

const std::vector<std::string>& computing_fields() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found;
    for (const auto& field : kConfigFields) {
      if (field.use == FieldUse::kComputes) found.emplace_back(field.name);
    }
    return found;
  }();
  return names;
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_adapter_config_fields", [](const std::string& method) {
    ConfigFields fields = config_fields(method);
    return std::tuple(std::move(fields.known), std::move(fields.refused));
  });
}

}  // namespace shoestring::lora
