#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

using NamedArguments = std::vector<std::pair<std::string, c10::IValue>>;

/// Calls the operator torch.ops.shoestring.NAME, which must return nothing, with arguments by name. Arguments
/// that are not given have their default values.
inline void call(const std::string& name, const NamedArguments& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("shoestring::" + name).c_str(), "");
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto given = std::find_if(arguments.begin(), arguments.end(),
                                    [&](const auto& pair) { return pair.first == argument.name(); });
    stack.push_back(given != arguments.end() ? given->second
                                             : argument.default_value().value_or(c10::IValue()));
  }
  op.callBoxed(stack);
}

/// Joins two lists of named arguments. If both contain a name, the argument in `later` is used.
inline NamedArguments with(const NamedArguments& later, const NamedArguments& earlier) {
  NamedArguments all = later;
  all.insert(all.end(), earlier.begin(), earlier.end());
  return all;
}

/// Returns tensors as the optional list of gradients that optimizer operators take.
inline c10::List<std::optional<at::Tensor>> gradients(const std::vector<at::Tensor>& tensors) {
  c10::List<std::optional<at::Tensor>> list;
  for (const auto& t : tensors) list.push_back(t);
  return list;
}
