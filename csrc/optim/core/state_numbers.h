#pragma once

#include <shoestring/files/safetensors.h>

#include "optim/rule.h"

namespace shoestring::optim::detail {

/// Returns the number called `key` of a state, which may be a tensor of any dtype. Raises for the class
/// `name` if there is none.
inline double number_of(const char* name, const TensorDict& state, const char* key) {
  const Tensor* number = state.find(key);
  expect(number != nullptr && number->defined() && number->numel() == 1, name, "load_state",
         c10::str("a tensor with one element called ", key),
         number == nullptr || !number->defined() ? "none" : c10::str("shape ", number->sizes()));
  return number->item<double>();
}

}  // namespace shoestring::optim::detail
