#pragma once

// A kernel and what the emulator has to say about it: part of the error's text, or null where the kernel is
// right.

#include <vector>

namespace simt_tests {

struct Case {
  const char* name;
  const char* (*run)();  // the launch's error, or null; allocates and checks the result itself
  const char* expected;
};

extern const std::vector<Case> kWrong, kRight;

}  // namespace simt_tests
