#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "catch2.h"
#include "device_array.h"

namespace simt_tests {

// Checks that launching a kernel with this deliberate mistake fails with an error that contains `expected`,
// under five orders of the threads.
template <class Flaw, class Launch>
void check_caught(Flaw flaw, const std::string& expected, Launch launch) {
  for (int order = 0; order < 5; ++order) {
    simt::set_order(order);
    const char* said = launch(flaw);
    const std::string error = said == nullptr ? "" : said;
    if (std::getenv("SIMT_SHOW")) std::printf("%2d  %s\n", static_cast<int>(flaw), error.c_str());
    INFO("flaw " << static_cast<int>(flaw) << ", expected '" << expected << "', received '" << error << "'");
    CHECK(error.find(expected) != std::string::npos);
  }
  simt::set_order(0);
}

}  // namespace simt_tests
