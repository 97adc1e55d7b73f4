#pragma once

// Reads the values of a Python group into options: read_value(value, option).

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace shoestring::optim::detail {

/// The options of a parameter group in Python, by name.
using Options = c10::Dict<std::string, c10::IValue>;
inline Options empty_options() {
  return c10::impl::toTypedDict<std::string, c10::IValue>(
      c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get()));
}

/// Reads a value. Returns false if it has another type than the option.
inline bool read_value(const c10::IValue& value, double& to) {
  if (!value.isInt() && !value.isDouble()) return false;
  to = value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
  return true;
}
inline bool read_value(const c10::IValue& value, int64_t& to) {
  return value.isInt() && (to = value.toInt(), true);
}
inline bool read_value(const c10::IValue& value, bool& to) {
  return value.isBool() && (to = value.toBool(), true);
}
inline bool read_value(const c10::IValue& value, std::string& to) {
  return value.isString() && (to = value.toStringRef(), true);
}
template <class T>
bool read_value(const c10::IValue& value, std::optional<T>& to) {
  to = std::nullopt;
  return value.isNone() || read_value(value, to.emplace());
}
template <class T>
bool read_value(const c10::IValue& value, std::vector<T>& to) {
  to.clear();
  if (!value.isList()) return false;
  for (const c10::IValue& item : value.toListRef()) {
    if (!read_value(item, to.emplace_back())) return false;
  }
  return true;
}
template <class... T>
bool read_value(const c10::IValue& value, std::tuple<T...>& to) {
  if (!value.isList() || value.toListRef().size() != sizeof...(T)) return false;
  size_t i = 0;
  return std::apply([&](T&... item) { return (read_value(value.toListRef()[i++], item) && ...); }, to);
}

}  // namespace shoestring::optim::detail
