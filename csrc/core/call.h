#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace shoestring {

/// Returns the operator `name` ("shoestring::op") as a typed callable that goes through PyTorch's dispatcher.
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using NamedArguments = std::vector<std::pair<std::string, c10::IValue>>;

/// Calls the operator `name` through PyTorch's dispatcher, with arguments named as in its schema. Arguments
/// that are not given take their defaults. Returns the operator's results.
torch::jit::Stack call_by_name(const std::string& name, const NamedArguments& arguments);

/// Reads the arguments of a boxed operator call from the stack by their names in the schema. Leaves them on
/// the stack.
class BoxedArguments {
 public:
  BoxedArguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : schema_(op.schema()), stack_(stack) {}

  const c10::IValue& operator[](const char* name) const;
  bool has(const char* name) const { return schema_.argumentIndexWithName(name).has_value(); }
  at::Tensor tensor(const char* name) const { return (*this)[name].toTensor(); }
  std::optional<at::Tensor> optional(const char* name) const {
    return (*this)[name].toOptional<at::Tensor>();
  }
  double number(const char* name) const { return (*this)[name].toDouble(); }

 private:
  const c10::FunctionSchema& schema_;
  const torch::jit::Stack& stack_;
};

}  // namespace shoestring
