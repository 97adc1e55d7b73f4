#include "config.h"

#include <sys/stat.h>
#include <unistd.h>

#include <shoestring/files/safetensors.h>
#include <fstream>
#include <nlohmann/json.hpp>

#include "input_error.h"

namespace {

using Json = nlohmann::json;

class Config {
 public:
  explicit Config(const std::string& path) : path_(path) {
    struct stat info{};
    const bool regular =
        ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && info.st_size <= kLargest;
    std::ifstream file;
    if (regular) file.open(path);
    if (!regular || !file.good()) refuse("expected a file of at most 1 MB, found none that can be read");
    json_ = Json::parse(
        file,
        [this](int depth, Json::parse_event_t, Json&) {
          if (depth > kDeepest) refuse("expected JSON that is less deeply nested");
          return true;
        },
        /*allow_exceptions=*/false);
    if (!json_.is_object()) refuse("expected a JSON object, received something else");
  }

  // Returns the value of a key in config.json, or null if the key is missing.
  Json value(const char* key) const { return json_.value(key, Json()); }
  int64_t size(const char* key) const { return size(key, value(key)); }
  int64_t size(const char* key, const Json& value) const {
    if (!value.is_number_integer() || value.get<int64_t>() < 1 || value.get<int64_t>() > (int64_t{1} << 31)) {
      refuse(std::string(key) + ": expected a whole number, at least 1, received " + value.dump());
    }
    return value.get<int64_t>();
  }
  double number(const char* key, const Json& value) const {
    if (!value.is_number() || !(value.get<double>() > 0)) {
      refuse(std::string(key) + ": expected a number above 0, received " + value.dump());
    }
    return value.get<double>();
  }
  // Raises unless the value in config.json is null or equals `expected`, the only supported value.
  void require(const char* key, const Json& value, const Json& expected) const {
    if (value.is_null() || value == expected) return;
    refuse(std::string(key) + ": expected " + expected.dump() +
           ", since nothing else is done here, received " + value.dump());
  }
  [[noreturn]] void refuse(const std::string& what) const {
    throw InputError("--model " + path_ + ": " + what.substr(0, kLongest) +
                     (what.size() > kLongest ? "..." : ""));
  }

 private:
  static constexpr int64_t kLargest = 1'000'000;  // maximum size of config.json in bytes
  static constexpr int kDeepest = 32;
  static constexpr size_t kLongest = 500;  // maximum length of an error message in characters
  std::string path_;
  Json json_;
};

// Newer config.json files have rope_theta and the type of rotary embedding in rope_parameters. Older files
// have rope_theta at the top level, and the type in rope_scaling.
double rope_theta(const Config& config) {
  Json theta = config.value("rope_theta");
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const Json rope = config.value(key);
    if (rope.is_null()) continue;
    if (!rope.is_object()) config.refuse(std::string(key) + ": expected an object, received " + rope.dump());
    for (const char* kind : {"rope_type", "type"}) config.require(kind, rope.value(kind, Json()), "default");
    config.require("partial_rotary_factor", rope.value("partial_rotary_factor", Json()), 1.0);
    if (rope.contains("rope_theta")) theta = rope["rope_theta"];
  }
  return theta.is_null() ? 10000 : config.number("rope_theta", theta);
}

// Returns whether the weights contain an output layer of their own.
bool stores_head(const std::string& directory) {
  const std::string single = directory + "/model.safetensors";
  const char* head = "lm_head.weight";
  if (::access(single.c_str(), F_OK) == 0) return shoestring::SafetensorsFile(single).contains(head);
  std::ifstream file(single + ".index.json");
  const Json index = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  return index.is_object() && index.contains("weight_map") && index["weight_map"].contains(head);
}

}  // namespace

LlamaConfig read_config(const std::string& directory) {
  const Config config(directory + "/config.json");
  if (config.value("model_type") != "llama") {
    config.refuse("model_type: expected \"llama\", since nothing else is done here, received " +
                  config.value("model_type").dump());
  }
  config.require("hidden_act", config.value("hidden_act"), "silu");
  config.require("attention_bias", config.value("attention_bias"), false);
  config.require("mlp_bias", config.value("mlp_bias"), false);
  config.require("partial_rotary_factor", config.value("partial_rotary_factor"), 1.0);
  const Json quantization = config.value("quantization_config");
  if (!quantization.is_null() &&
      (!quantization.is_object() || quantization.value("quant_method", Json()) != "bitsandbytes")) {
    config.refuse("quantization_config: expected none, or quant_method \"bitsandbytes\", received " +
                  quantization.dump());
  }

  LlamaConfig llama{.vocab_size = config.size("vocab_size"),
                    .hidden = config.size("hidden_size"),
                    .intermediate = config.size("intermediate_size"),
                    .layers = config.size("num_hidden_layers"),
                    .heads = config.size("num_attention_heads"),
                    .kv_heads = 0,
                    .head_dim = 0,
                    .max_tokens = config.size("max_position_embeddings")};
  const Json kv_heads = config.value("num_key_value_heads"), head_dim = config.value("head_dim");
  llama.kv_heads = kv_heads.is_null() ? llama.heads : config.size("num_key_value_heads", kv_heads);
  llama.head_dim = head_dim.is_null() ? llama.hidden / llama.heads : config.size("head_dim", head_dim);
  if (llama.heads % llama.kv_heads != 0) {
    config.refuse("num_key_value_heads: expected a divisor of num_attention_heads, " +
                  std::to_string(llama.heads) + ", received " + std::to_string(llama.kv_heads));
  }
  if (llama.head_dim < 2 || llama.head_dim % 2 != 0) {
    config.refuse("head_dim: expected an even number, received " + std::to_string(llama.head_dim));
  }
  llama.rms_norm_eps = config.number("rms_norm_eps", config.value("rms_norm_eps"));
  llama.rope_theta = rope_theta(config);
  // A model whose output layer was merged with an adapter stores one, whatever the configuration says.
  llama.tied = config.value("tie_word_embeddings") == true && !stores_head(directory);
  llama.placeholders = true;
  return llama;
}
