#include "adapters/config_digest.h"

#include <c10/util/hash.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "adapters/config_fields.h"
#include "files/read_file.h"

namespace shoestring::lora {
namespace {

bool is_unset(const Json& value) {
  return value.is_null() || value == false || (!value.is_primitive() && value.empty()) || value == "";
}

// Sorts the strings in `parts` and joins them between an opening and a closing bracket, the two characters of
// `brackets`.
std::string joined(std::vector<std::string> parts, const char* brackets) {
  std::sort(parts.begin(), parts.end());
  std::string text(1, brackets[0]);
  for (const auto& part : parts) text += part;
  return text + brackets[1];
}

std::string canonical(const Json& value, int depth = 0) {
  if (value.is_null()) return "n";
  if (value.is_boolean()) return value.get<bool>() ? "t" : "f";
  if (value.is_number()) {
    char bits[18];
    std::snprintf(bits, sizeof bits, "d%016llx",
                  static_cast<unsigned long long>(std::bit_cast<uint64_t>(value.get<double>())));
    return bits;
  }
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    return "s" + std::to_string(text.size()) + ":" + text;
  }
  if (depth == 3) return "x";  // no field of PEFT's configuration nests lists or objects this deeply
  std::vector<std::string> parts;
  for (const auto& item : value.items()) {
    parts.push_back((value.is_object() ? canonical(item.key()) : "") + canonical(item.value(), depth + 1));
  }
  return joined(std::move(parts), value.is_object() ? "{}" : "[]");
}

}  // namespace

std::string config_digest(const Json& config) {
  std::vector<std::string> parts;
  for (const auto& name : computing_fields()) {
    const auto value = config.find(name);
    if (value != config.end() && !is_unset(*value)) parts.push_back(canonical(name) + canonical(*value, 1));
  }
  return c10::sha1(joined(std::move(parts), "{}")).str();
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_adapter_config_digest", [](const std::string& config) {
    return config_digest(files::parse_json("lora: adapter_config.json", config));
  });
}

}  // namespace shoestring::lora
