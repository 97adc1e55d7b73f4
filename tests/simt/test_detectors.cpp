// Tests that the emulator accepts the correct kernels of kernels/right.cu, and reports the mistake of each
// kernel in kernels/wrong.cu, under every order of the threads.

#include <cstdio>
#include <cstdlib>
#include <string>

#include "catch2.h"
#include "kernels/cases.h"
#include "simt.h"

using simt_tests::Case;

TEST_CASE("right kernels run, whatever the order of the threads") {
  for (const Case& c : simt_tests::kRight) {
    for (int order = 0; order < 8; ++order) {  // ascending, descending, and six random orders of the threads
      simt::set_order(order);
      const char* error = c.run();
      INFO(c.name << ", order " << order);
      CHECK(std::string(error == nullptr ? "" : error) == "");
    }
  }
}

TEST_CASE("wrong kernels are caught, whatever the order of the threads") {
  for (const Case& c : simt_tests::kWrong) {
    for (int order = 0; order < 8; ++order) {
      simt::set_order(order);
      const char* error = c.run();
      INFO(c.name << ", order " << order << ", expected: " << c.expected
                  << ", received: " << (error ? error : "nothing"));
      REQUIRE(error != nullptr);
      CHECK(std::string(error).find(c.expected) != std::string::npos);
      if (std::getenv("SIMT_SHOW") && order == 0) std::printf("%-26s %s\n", c.name, error);
    }
  }
  simt::set_order(0);
}
