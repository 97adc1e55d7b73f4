// Tests the random numbers of csrc/core/philox.h on the host and in a kernel. The file is built twice, with
// the emulator and with nvcc for a GPU.

#include <cstdint>
#include <vector>

#include "catch2.h"
#include "core/philox.h"
#include "device_array.h"
#include "kernels/primitives.h"

using namespace simt_tests;
using shoestring::kernels::philox;
using shoestring::kernels::philox_at;
using shoestring::kernels::Random4;

namespace {

std::vector<uint32_t> words(const Random4& r) { return {r.value, r.value + 4}; }

}  // namespace

TEST_CASE("Philox 4x32 gives the published answers") {  // kat_vectors of Random123 has these answers
  const Random4 ones{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
      pi{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}};
  CHECK(words(philox({{0, 0, 0, 0}}, 0, 0, 10)) ==
        std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(words(philox(ones, 0xffffffff, 0xffffffff, 10)) ==
        std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(words(philox(pi, 0xa4093822, 0x299f31d0, 10)) ==
        std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
  CHECK(words(philox({{0, 0, 0, 0}}, 0, 0)) ==
        std::vector<uint32_t>{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48});
  CHECK(words(philox(ones, 0xffffffff, 0xffffffff)) ==
        std::vector<uint32_t>{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662});
  CHECK(words(philox(pi, 0xa4093822, 0x299f31d0)) ==
        std::vector<uint32_t>{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a});
  // philox_at puts the seed into Philox's key, and step and index into the counter, lower halves first.
  CHECK(words(philox_at(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88)) ==
        words(philox(pi, 0xa4093822, 0x299f31d0)));
}

TEST_CASE("a kernel draws the same random bits as the host") {
  // The lower 32 bits of the indices overflow in the middle of the range.
  const uint64_t seed = 0x123456789abcdef0, step = 1000, first = (uint64_t{1} << 32) - 16;
  DeviceArray<unsigned> out(std::vector<unsigned>(32 * 4));
  const char* error = random_bits(seed, step, first, 32, out.data());
  REQUIRE(error == nullptr);
  std::vector<unsigned> expected;
  for (uint64_t i = 0; i < 32; ++i) {
    for (uint32_t x : words(philox_at(seed, step, first + i))) expected.push_back(x);
  }
  CHECK(out.to_host() == expected);
}
