#pragma once

// A test case: a kernel, and a part of the error that the emulator must report, or null if the kernel is
// correct.

#include <vector>

namespace simt_tests {

struct Case {
  const char* name;
  // allocates memory, launches the kernel and checks its result; returns the launch error, or null
  const char* (*run)();
  const char* expected;
};

extern const std::vector<Case> kWrong, kRight;

}  // namespace simt_tests
