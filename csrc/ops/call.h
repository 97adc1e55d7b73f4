#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

namespace shoestring {

/// The operator `name` ("shoestring::op") as a typed callable, for a call through PyTorch's dispatcher.
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using NamedArguments = std::vector<std::pair<std::string, c10::IValue>>;

/// Calls an operator that returns nothing, with arguments by the names of its schema; the others have their defaults.
void call_by_name(const std::string& name, const NamedArguments& arguments);

}  // namespace shoestring
