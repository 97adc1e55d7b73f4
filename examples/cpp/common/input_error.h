#pragma once

#include <stdexcept>

/// An error that the user can correct. It is printed as one line, with exit code 2.
struct InputError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
