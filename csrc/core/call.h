#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace shoestring {

/// Returns the operator `name` ("shoestring::op") as a typed callable that goes through PyTorch's dispatcher.
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace shoestring
