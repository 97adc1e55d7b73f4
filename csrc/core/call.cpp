#include "core/call.h"

#include <algorithm>

namespace shoestring {

torch::jit::Stack call_by_name(const std::string& name, const NamedArguments& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  torch::jit::Stack stack;
  size_t used = 0;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto given = std::find_if(arguments.begin(), arguments.end(),
                                    [&](const auto& pair) { return pair.first == argument.name(); });
    used += given != arguments.end();
    stack.push_back(given != arguments.end() ? given->second
                                             : argument.default_value().value_or(c10::IValue()));
  }
  TORCH_INTERNAL_ASSERT(used == arguments.size(), name, ": an argument has a name that the schema lacks");
  op.callBoxed(stack);
  return stack;
}

const c10::IValue& BoxedArguments::operator[](const char* name) const {
  const auto index = schema_.argumentIndexWithName(name);
  TORCH_INTERNAL_ASSERT(index.has_value(), schema_.name(), " has no argument ", name);
  return torch::jit::peek(stack_, *index, schema_.arguments().size());
}

}  // namespace shoestring
