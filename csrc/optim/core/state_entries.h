#pragma once

#include <string>

#include <ATen/core/Dict.h>
#include <shoestring/files/safetensors.h>

namespace shoestring::optim::detail {

/// The type that a state has in Python.
using StateEntries = c10::Dict<std::string, at::Tensor>;

inline StateEntries entries_of(const TensorDict& state) {
  StateEntries entries;
  for (const auto& item : state) entries.insert(item.key(), item.value());
  return entries;
}

inline TensorDict state_of(const StateEntries& entries) {
  TensorDict state;
  for (const auto& entry : entries) state.insert(entry.key(), entry.value());
  return state;
}

}  // namespace shoestring::optim::detail
