// Tests the checksums of weights in a file: they differ where one bit differs, and cover whole units.
#include "catch.h"

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "offload/checksums.h"

using shoestring::checksum;
using shoestring::offload::Checksums;

TEST_CASE("a checksum notices each single bit", "[checksums]") {
  std::mt19937 random(1);
  for (const int64_t size : {1, 3, 127, 128, 129, 1000}) {
    std::vector<uint8_t> bytes(static_cast<size_t>(size));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    const uint32_t sum = checksum(bytes.data(), size);
    CHECK(checksum(bytes.data(), size) == sum);
    for (int64_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] ^= 1 << (bit % 8);
      REQUIRE(checksum(bytes.data(), size) != sum);
      bytes[bit / 8] ^= 1 << (bit % 8);
    }
    if (size > 1 && bytes[0] != bytes[1]) {
      std::swap(bytes[0], bytes[1]);
      CHECK(checksum(bytes.data(), size) != sum);
    }
  }
  const std::vector<uint8_t> zeros(512);
  CHECK(checksum(zeros.data(), 256) != checksum(zeros.data(), 384));
  CHECK(checksum(zeros.data(), 0) != checksum(zeros.data(), 1));
}

TEST_CASE("units begin at 0 and at the split", "[checksums]") {
  Checksums sums(25, 4, 10);
  const auto units = [&](int64_t begin, int64_t end) {
    std::vector<std::pair<int64_t, int64_t>> found;
    sums.for_each(begin, end, [&](int64_t at, int64_t size, uint32_t&) { found.emplace_back(at, size); });
    return found;
  };
  using Units = std::vector<std::pair<int64_t, int64_t>>;
  CHECK(units(0, 25) == Units{{0, 4}, {4, 4}, {8, 2}, {10, 4}, {14, 4}, {18, 4}, {22, 3}});
  CHECK(units(0, 10) == Units{{0, 4}, {4, 4}, {8, 2}});
  CHECK(units(1, 13) == Units{{4, 4}, {8, 2}});
  CHECK(units(11, 25) == Units{{14, 4}, {18, 4}, {22, 3}});
  CHECK(units(23, 25).empty());
  sums.for_each(0, 25, [](int64_t at, int64_t, uint32_t& sum) { sum = static_cast<uint32_t>(at); });
  sums.for_each(0, 25, [](int64_t at, int64_t, uint32_t sum) { CHECK(sum == at); });
}
