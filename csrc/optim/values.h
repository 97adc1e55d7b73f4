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

inline void read_value(const c10::IValue& value, double& to) {
  to = value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
}
inline void read_value(const c10::IValue& value, int64_t& to) { to = value.toInt(); }
inline void read_value(const c10::IValue& value, bool& to) { to = value.toBool(); }
inline void read_value(const c10::IValue& value, std::string& to) { to = value.toStringRef(); }
template <class T>
void read_value(const c10::IValue& value, std::optional<T>& to) {
  if (value.isNone()) {
    to = std::nullopt;
  } else {
    read_value(value, to.emplace());
  }
}
template <class T>
void read_value(const c10::IValue& value, std::vector<T>& to) {
  to.clear();
  for (const c10::IValue& item : value.toListRef()) read_value(item, to.emplace_back());
}
template <class... T>
void read_value(const c10::IValue& value, std::tuple<T...>& to) {
  const auto items = value.toListRef();
  TORCH_CHECK(items.size() == sizeof...(T), "expected ", sizeof...(T), " numbers, received ", items.size());
  size_t i = 0;
  std::apply([&](T&... item) { (read_value(items[i++], item), ...); }, to);
}

}  // namespace shoestring::optim::detail
