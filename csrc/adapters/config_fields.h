#pragma once

#include <string>
#include <vector>

namespace shoestring::lora {

/// The fields of one method's adapter_config.json.
struct ConfigFields {
  std::vector<std::string> known;    // every field whose meaning for the adapter is known
  std::vector<std::string> refused;  // the known fields that must be off, because nothing here supports them
};

/// Returns the fields that PEFT writes for a method, such as "LORA". A method that is not supported has none.
ConfigFields config_fields(const std::string& method);

/// Returns the fields that change what an adapter of any method computes.
const std::vector<std::string>& computing_fields();

}  // namespace shoestring::lora
