#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "twins.h"

namespace twins {

/// Compares two tables element by element and prints a line. Tables that are empty or of unequal length
/// count as different. main() fails if any tables differ, or if there were fewer comparisons than expected.
void compare(const std::string& name, const std::vector<int64_t>& ours, const std::vector<int64_t>& cutes);

template <class T>
std::vector<int64_t> as_table(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}

// The groups of comparisons, each in a file of its own.
void compare_warp_matrices();
void compare_wgmma();
void compare_copies();
void compare_numbers();

inline const char* name_of(Type type) {
  return type == Type::bf16 ? "bf16" : type == Type::fp16 ? "fp16" : "tf32";
}

/// Returns the bits of a number that is exact in the type.
inline uint32_t bits_of(Type type, float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if (type == Type::tf32) return u;
  if (type == Type::bf16) return u >> 16;
  const auto half = static_cast<_Float16>(x);
  uint16_t b;
  std::memcpy(&b, &half, 2);
  return b;
}

/// Small integers that look random, equal in each run. Sums of their products are exact in fp32.
inline float scrambled(int seed, int i, int j) {
  uint32_t x = static_cast<uint32_t>(seed) * 0x9e3779b9u + static_cast<uint32_t>(i) * 0x85ebca6bu +
               static_cast<uint32_t>(j) * 0xc2b2ae35u;
  x = (x ^ x >> 15) * 0x2c1b3c6du;
  return static_cast<float>(static_cast<int>((x ^ x >> 13) % 17) - 8);
}

/// Returns the registers of all threads that hold a matrix, given as a function of (row, column), if value v
/// of thread t is the matrix's element layout(t, v) in column-major order.
template <class Layout>
std::vector<uint32_t> registers(Type type, Layout layout, int threads, int values, int rows,
                                const std::function<float(int, int)>& matrix) {
  const int per = type == Type::tf32 ? 1 : 2;
  std::vector<uint32_t> packed(threads * values / per);
  for (int t = 0; t < threads; ++t) {
    for (int v = 0; v < values; ++v) {
      const int at = static_cast<int>(layout(t, v));
      packed[(t * values + v) / per] |= bits_of(type, matrix(at % rows, at / rows)) << v % per * 16;
    }
  }
  return packed;
}

}  // namespace twins
