#pragma once

// Reads and writes structures as JSON. A structure lists its fields once, in a function
// `fields(visit, structure)` that calls visit(name, field) for each of them.

#include <cstdint>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include "planning/check.h"
#include "planning/fields.h"

namespace shoestring::planning {

using Json = nlohmann::ordered_json;

template <class T>
Json to_json(T value);

struct JsonWriter {
  template <class T>
  void operator()(const char* name, T& field) {
    object[name] = to_json(field);
  }
  Json object = Json::object();
};

template <class T>
Json list_to_json(const std::vector<T>& values) {
  Json list = Json::array();
  for (const T& value : values) list.push_back(to_json(value));
  return list;
}

// `value` is a copy, since fields() takes structures by reference that it may change.
template <class T>
Json to_json(T value) {
  if constexpr (IsVector<T>::value) {
    return list_to_json(value);
  } else if constexpr (std::is_same_v<T, MaybeInt>) {
    return value ? Json(*value) : Json(nullptr);
  } else if constexpr (std::is_same_v<T, Texts> || std::is_same_v<T, Tiles> || std::is_arithmetic_v<T> ||
                       std::is_same_v<T, std::string>) {
    return value;
  } else {
    JsonWriter writer;
    fields(writer, value);
    return writer.object;
  }
}

/// Reads a field. Raises ValueError, whose message begins with `where`, the path of the field.
template <class T>
void from_json(const nlohmann::json& json, T& to, const std::string& where) {
  const auto expect = [&](bool good, const char* what) {
    TORCH_CHECK_VALUE(good, where, ": expected ", what, ", received ", json.type_name());
  };
  if constexpr (IsVector<T>::value) {
    expect(json.is_array(), "a list");
    to.clear();
    for (size_t i = 0; i < json.size(); ++i) {
      to.emplace_back();
      from_json(json[i], to.back(), where + "[" + std::to_string(i) + "]");
    }
  } else if constexpr (std::is_same_v<T, MaybeInt>) {
    to.reset();
    if (!json.is_null()) from_json(json, to.emplace(), where);
  } else if constexpr (std::is_same_v<T, Texts> || std::is_same_v<T, Tiles>) {
    expect(json.is_object(), "an object");
    to.clear();
    for (const auto& [key, value] : json.items()) from_json(value, to[key], where + "." + shown(key));
  } else if constexpr (std::is_same_v<T, std::string>) {
    expect(json.is_string(), "a text");
    to = json.template get<std::string>();
  } else if constexpr (std::is_same_v<T, bool>) {
    expect(json.is_boolean(), "true or false");
    to = json.template get<bool>();
  } else if constexpr (std::is_integral_v<T>) {
    expect(
        json.is_number_integer() && (!json.is_number_unsigned() || json.template get<uint64_t>() >> 63 == 0),
        "a whole number below 2^63");
    to = json.template get<T>();
  } else if constexpr (std::is_floating_point_v<T>) {
    expect(json.is_number(), "a number");
    to = json.template get<T>();
  } else {
    expect(json.is_object(), "an object");
    std::set<std::string> known;
    const auto read = [&](const char* name, auto& field) {
      known.insert(name);
      const auto found = json.find(name);
      TORCH_CHECK_VALUE(found != json.end(), where, ": expected the field ", name, ", received none");
      from_json(*found, field, where + "." + name);
    };
    fields(read, to);
    for (const auto& [key, value] : json.items()) {
      TORCH_CHECK_VALUE(known.count(key), where, ": expected none but the fields of this version, received ",
                        Json(key).dump(-1, ' ', true, Json::error_handler_t::replace));
    }
  }
}

}  // namespace shoestring::planning
