#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

using NamedArguments = std::vector<std::pair<std::string, c10::IValue>>;

/// Returns the operator torch.ops.shoestring.NAME.
inline c10::OperatorHandle find_operator(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("shoestring::" + name).c_str(), "");
}

/// Returns the argument of a name. Raises an error if the operator has none.
inline const c10::Argument& argument_of(const c10::FunctionSchema& schema, const std::string& name) {
  const auto index = schema.argumentIndexWithName(name);
  TORCH_CHECK(index, schema.name(), ": expected the name of an argument, received ", name);
  return schema.arguments()[*index];
}

/// Calls the operator torch.ops.shoestring.NAME with arguments by name. Arguments that are not given have
/// their default values. Returns the tensors of the results, also those in lists, in one vector.
inline std::vector<at::Tensor> call(const std::string& name, const NamedArguments& arguments) {
  const auto op = find_operator(name);
  for (const auto& given : arguments) argument_of(op.schema(), given.first);
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto given = std::find_if(arguments.begin(), arguments.end(),
                                    [&](const auto& pair) { return pair.first == argument.name(); });
    stack.push_back(given != arguments.end() ? given->second
                                             : argument.default_value().value_or(c10::IValue()));
  }
  op.callBoxed(stack);
  std::vector<at::Tensor> results;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) results.push_back(value.toTensor());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) results.push_back(tensor);
  }
  return results;
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
