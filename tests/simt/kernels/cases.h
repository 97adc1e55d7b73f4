#pragma once

// A kernel and the expected verdict of the emulator: a part of the error's text, or null if the kernel is
// right.

#include <vector>

namespace simt_tests {

struct Case {
  const char* name;
  const char* (*run)();  // returns the launch's error or null; allocates and checks the result itself
  const char* expected;
};

extern const std::vector<Case> kWrong, kRight;

}  // namespace simt_tests
