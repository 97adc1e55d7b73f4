#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <type_traits>

#include <nlohmann/json.hpp>

#include <shoestring/safetensors.h>

#include "files/read_file.h"
#include "files/safetensors_format.h"
#include "optim/saved.h"

// Format of the safetensors file that save_optimizer writes. Tensors are called "<parameter group>.<index of
// the parameter in the group>.<name>". The metadata has the keys:
// - format: "shoestring.optimizer";
// - format_version;
// - optimizer: the name of the class;
// - groups: JSON, a list of {"size": number of parameters, "options": {...}}. Python may add "extra", in
//   which learning rate schedulers keep their values.

namespace shoestring::optim {
namespace {

using namespace detail;
using Json = nlohmann::json;
using files::quote;

constexpr const char* kFormat = "shoestring.optimizer";

std::string entry(size_t group, size_t index, const std::string& name) {
  return std::to_string(group) + "." + std::to_string(index) + "." + name;
}

template <class T>
Json json_of(const T& value) {
  return value;
}
template <class T>
Json json_of(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}
template <class... T>
Json json_of(const std::tuple<T...>& several) {
  return std::apply([](const T&... value) { return Json(std::vector<Json>{json_of(value)...}); }, several);
}

// Formats a text from a file for an error message. Quotes it if it is long or has non-printable characters.
std::string brief(const std::string& text) {
  const bool plain = std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
  return plain && text.size() <= 64 ? text : quote(text);
}

// Raises for a number outside int64_t, which json.get would silently change.
int64_t integer(const Json& json) {
  const bool fits =
      json.is_number_integer() && (!json.is_number_unsigned() || json.get<uint64_t>() <= INT64_MAX);
  TORCH_CHECK_VALUE(fits, "expected an integer, received ", quote(json.dump()));
  return json.get<int64_t>();
}

template <class T>
void read_field(const Json& json, T& value) {
  if constexpr (std::is_same_v<T, int64_t>) {
    value = integer(json);
  } else {
    json.get_to(value);
    if constexpr (std::is_same_v<T, std::string>) {
      TORCH_CHECK_VALUE(brief(value) == value, "expected the name of an option, received ", quote(value));
    }
  }
}
template <class T>
void read_field(const Json& json, std::optional<T>& value) {
  if (json.is_null()) {
    value = std::nullopt;
  } else {
    read_field(json, value.emplace());
  }
}
template <class... T>
void read_field(const Json& json, std::tuple<T...>& several) {
  size_t i = 0;
  TORCH_CHECK_VALUE(json.size() == sizeof...(T), "expected ", sizeof...(T), " numbers, received ",
                    json.size());
  std::apply([&](T&... value) { (read_field(json.at(i++), value), ...); }, several);
}

Json options_json(const LowMemoryOptions& options) {
  Json json = Json::object();
  for (const Field& field : Access::fields(options)) {
    std::visit([&](const auto* value) { json[field.name] = json_of(*value); }, field.value);
  }
  return json;
}

// Reads the sizes and options of the parameter groups, without the states of parameters. Throws a JSON
// exception if an entry is missing or has a wrong type.
std::vector<Saved::Group> read_groups(const Json& json, const LowMemoryOptimizer& optimizer,
                                      const char* where) {
  const char* name = Access::core(optimizer).name();
  const auto& ours = optimizer.param_groups();
  expect(json.size() == ours.size(), name, where, c10::str(ours.size(), " groups of parameters"),
         json.size());
  std::vector<Saved::Group> groups;
  for (size_t g = 0; g < ours.size(); ++g) {
    const int64_t size = integer(json.at(g).at("size")),
                  expected = static_cast<int64_t>(ours[g].params().size());
    expect(size == expected, name, where, c10::str(expected, " parameters in group ", g), size);
    Saved::Group& to = groups.emplace_back();
    to.states.resize(static_cast<size_t>(size));
    to.options = optimizer.defaults().clone();
    Json options = json.at(g).at("options");
    for (const Field& field : Access::fields(static_cast<const LowMemoryOptions&>(*to.options))) {
      std::visit([&](auto* value) { read_field(options.at(field.name), *value); }, field.value);
      options.erase(field.name);
    }
    expect(options.empty(), name, where, "this optimizer's options alone", brief(options.dump()));
  }
  return groups;
}

}  // namespace

void save_optimizer(const LowMemoryOptimizer& optimizer, const std::string& path) {
  Core& core = Access::core(optimizer);
  core.settle();
  TensorDict tensors;
  Json groups = Json::array();
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& params = optimizer.param_groups()[g].params();
    groups.push_back({{"size", params.size()}, {"options", options_json(core.options(g))}});
    for (size_t i = 0; i < params.size(); ++i) {
      const ParamState* state = core.state(params[i]);
      if (state == nullptr) continue;
      for (const auto& [name, tensor] : state->tensors()) tensors.insert(entry(g, i, name), tensor);
    }
  }
  if (core.step_in_backward && core.grad_norm.defined()) tensors.insert("grad_norm", core.grad_norm);
  save_safetensors(path, tensors,
                   {{"format", kFormat},
                    {"format_version", std::to_string(kFormatVersion)},
                    {"optimizer", core.name()},
                    {"groups", groups.dump()}});
}

void load_optimizer(LowMemoryOptimizer& optimizer, const std::string& path) {
  const SafetensorsFile file(path);
  const std::string name = Access::core(optimizer).name(), where = "load_optimizer: " + path;
  const auto metadata = [&](const char* key) {
    const auto found = file.metadata().find(key);
    return found == file.metadata().end() ? "none" : found->second;
  };
  const auto check = [&](const char* key, const std::string& expected) {
    expect(metadata(key) == expected, name.c_str(), where.c_str(), c10::str(key, " ", expected),
           brief(metadata(key)));
  };
  check("format", kFormat);
  check("format_version", std::to_string(kFormatVersion));
  check("optimizer", name);
  Saved saved;
  try {
    saved.groups =
        read_groups(files::parse_json(where + ": groups", metadata("groups")), optimizer, where.c_str());
  } catch (const Json::exception& error) {
    expect(false, name.c_str(), where.c_str(), "groups with this optimizer's options", error.what());
  }
  std::vector<std::vector<std::map<std::string, Tensor>>> tensors;
  for (const auto& group : saved.groups) tensors.emplace_back(group.states.size());
  for (const auto& item : file.entries()) {
    if (item.name == "grad_norm") {
      saved.grad_norm = file.load(item.name);
      continue;
    }
    size_t g = 0, i = 0;
    int length = 0;
    const bool parsed = std::sscanf(item.name.c_str(), "%zu.%zu.%n", &g, &i, &length) == 2 && length > 0;
    const std::string part = parsed ? item.name.substr(static_cast<size_t>(length)) : "";
    const bool fits = parsed && g < tensors.size() && i < tensors[g].size() && entry(g, i, part) == item.name;
    expect(fits, name.c_str(), where.c_str(), "tensors called <group>.<index>.<name>, of the file's groups",
           brief(item.name));
    tensors[g][i][part] = file.load(item.name);
  }
  for (size_t g = 0; g < tensors.size(); ++g) {
    for (size_t i = 0; i < tensors[g].size(); ++i)
      saved.groups[g].states[i] = ParamState(std::move(tensors[g][i]));
  }
  restore(optimizer, std::move(saved));
}

}  // namespace shoestring::optim
