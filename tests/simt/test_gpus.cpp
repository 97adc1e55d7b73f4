// Tests what the emulator takes from the selected GPU, and the log of launches.

#include <string>

#include "catch2.h"
#include "kernels/shared.h"
#include "simt.h"

namespace {

std::string text(const char* error) { return error == nullptr ? "" : error; }

// Selects the default GPU at the end of a test.
struct Selected {
  ~Selected() { simt::set_gpu("A100"); }
};

}  // namespace

TEST_CASE("static and dynamic shared memory together fit the GPU") {
  const Selected restore;
  for (const simt::Gpu& gpu : simt::gpus()) {
    INFO(gpu.name);
    REQUIRE(simt::set_gpu(gpu.name));
    const int most = gpu.shared_bytes - simt_tests::kStaticBytes;
    CHECK(text(simt_tests::take_shared(most)) == "");
    const std::string error = text(simt_tests::take_shared(most + 16));
    CHECK(error.find("a block takes 2064 bytes of static and " + std::to_string(most + 16) +
                     " bytes of dynamic shared memory, and has at most " +
                     std::to_string(gpu.shared_bytes)) != std::string::npos);
  }
}

TEST_CASE("launches are logged with their kernel, and need not run") {
  simt::log_launches(true, true);
  CHECK(text(simt_tests::take_shared(1024)) == "");
  simt::log_launches(false, false);
  const auto launches = simt::take_launches();
  REQUIRE(launches.size() == 1);
  CHECK(launches[0].kernel == "simt_tests::take<float, 512>");
  CHECK(launches[0].file == "shared.cu");
  CHECK(launches[0].threads == 64);
  CHECK(launches[0].static_bytes == simt_tests::kStaticBytes);
  CHECK(launches[0].dynamic_bytes == 1024);
  CHECK(text(simt_tests::take_shared(1024)) == "");
  CHECK(simt::take_launches().empty());
}

TEST_CASE("a GPU that the emulator does not know is refused") {
  const Selected restore;
  CHECK(simt::set_capability(120));
  CHECK(std::string(simt::gpu().name) == "RTX 5090");
  CHECK_FALSE(simt::set_capability(70));
  CHECK_FALSE(simt::set_gpu("A101"));
  CHECK(std::string(simt::gpu().name) == "RTX 5090");
}
