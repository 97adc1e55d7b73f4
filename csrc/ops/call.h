#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace shoestring {

/// The operator `name` ("shoestring::op") as a typed callable, for a call through PyTorch's dispatcher.
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace shoestring
