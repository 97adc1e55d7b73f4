#pragma once

#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace shoestring::lora {

using Json = nlohmann::json;

/// The content of an adapter_config.json, of which every value was checked.
class AdapterConfig {
 public:
  /// Parses `text`, which may come from an untrusted source. `where` begins error messages. Raises ValueError
  /// if the method is none of `methods`, or if a field is on that PEFT does not write for the method, that
  /// nothing here supports, or whose value has a wrong type or range. The message names the field.
  AdapterConfig(const std::string& where, const std::string& text, const std::vector<std::string>& methods);

  /// Returns the value of a field; null if the file lacks it.
  const Json& operator[](const char* name) const;
  /// Raises ValueError, whose message ends with `hint`, unless a field has the expected value.
  void expect(bool good, const char* name, const std::string& expected, const char* hint = "") const;
  /// Returns config_digest() of the file.
  std::string digest() const;

  std::string method;  // the field peft_type
  /// The values of the fields that are read and not null, by the names of Python's options, such as "rank".
  /// The keys of an object are in the order of the file. A field of LoRA that is missing has PEFT's default.
  nlohmann::ordered_json options = nlohmann::ordered_json::object();

 private:
  std::string where_;
  Json fields_;
};

/// Returns whether a value is off. PEFT writes its new fields into every file, with such values by default.
bool is_off(const Json& value);

/// Returns the fields that change what an adapter of any method computes.
const std::set<std::string>& computing_fields();

}  // namespace shoestring::lora
