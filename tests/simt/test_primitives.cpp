// Tests the functions of cuda/core/ptx.h. The file is built twice, with the emulator (simt_tests) and with
// nvcc for a GPU (cuda_primitives_tests). The same kernels must give the same results.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "catch2.h"
#include "device_array.h"
#include "kernels/primitives.h"

using namespace simt_tests;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::string text(const char* error) { return error == nullptr ? "" : error; }

// Calls `check` under five orders of the emulator's threads; on a GPU, calls it twice.
template <class Check>
void in_every_order(Check check) {
#if defined(CUDART_VERSION)
  for (int i = 0; i < 2; ++i) check();
#else
  for (int order = 0; order < 5; ++order) {
    INFO("order " << order);
    simt::set_order(order);
    check();
  }
  simt::set_order(0);
#endif
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// A matrix in its dtype (bits16 or fp32). `exact` holds the values with which the tensor cores compute, after
// rounding.
struct Matrix {
  std::vector<double> exact;
  std::vector<uint16_t> bits16;
  std::vector<float> fp32;

  Matrix(const std::vector<float>& values, Type type) {
    for (float x : values) {
      const uint32_t u = bits_of(x);
      if (type == Type::bf16) {
        bits16.push_back(static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16));
        exact.push_back(float_of(uint32_t{bits16.back()} << 16));
      } else if (type == Type::fp16) {
        const auto half = static_cast<_Float16>(x);
        uint16_t b;
        std::memcpy(&b, &half, 2);
        bits16.push_back(b);
        exact.push_back(static_cast<float>(half));
      } else {
        fp32.push_back(x);
        exact.push_back(float_of((u + 0x1000) & ~0x1fffu));  // rounds to TF32 as to_tf32 does
      }
    }
  }
};

// Returns random multiples of 1/32 up to 4. They are exact in bf16, fp16 and TF32, and every sum of up to 128
// of their products is exact in fp32.
std::vector<float> exact_values(size_t n, std::mt19937& random) {
  std::vector<float> values(n);
  for (float& x : values) x = static_cast<float>(static_cast<int>(random() % 257) - 128) / 32;
  return values;
}
std::vector<float> normal_values(size_t n, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& x : values) x = normal(random);
  return values;
}

struct Shape {
  int m, n, k;
};

// Returns the largest error of an element of c, compared with the matrix product in fp64. Each error is
// divided by the sum of the products' magnitudes.
double error_of(const std::vector<float>& c, const Matrix& a, const Matrix& b, bool b_is_kn, Shape s) {
  double worst = 0;
  for (int i = 0; i < s.m; ++i) {
    for (int j = 0; j < s.n; ++j) {
      double sum = 0, magnitude = 1e-30;
      for (int l = 0; l < s.k; ++l) {
        const double product = a.exact[i * s.k + l] * b.exact[b_is_kn ? l * s.n + j : j * s.k + l];
        sum += product;
        magnitude += std::abs(product);
      }
      const double error = std::abs(c[i * s.n + j] - sum) / magnitude;
      // a negated comparison, so that a NaN error becomes the worst one
      if (!(error <= worst)) worst = error;
    }
  }
  return worst;
}

void check_gemm(Type type, bool b_is_kn, Shape s, bool exact) {
  INFO("type " << static_cast<int>(type) << ", b (k, n): " << b_is_kn << ", shape " << s.m << " " << s.n
               << " " << s.k);
  std::mt19937 random(s.m + s.n + s.k);
  const auto values = [&](size_t n) { return exact ? exact_values(n, random) : normal_values(n, random); };
  const Matrix a(values(s.m * s.k), type), b(values(s.n * s.k), type);
  DeviceArray<uint16_t> a16(a.bits16), b16(b.bits16);
  DeviceArray<float> a32(a.fp32), b32(b.fp32);
  std::vector<float> first;
  in_every_order([&] {
    DeviceArray<float> c(std::vector<float>(s.m * s.n, kNaN));
    Gemm problem{type, b_is_kn, a16.data(), b16.data(), c.data(), s.m, s.n, s.k};
    if (type == Type::tf32) problem.a = a32.data(), problem.b = b32.data();
    REQUIRE(text(gemm(problem)) == "");
    const std::vector<float> result = c.to_host();
    // The tensor cores add in fp32 and may truncate. An element of the result takes at most k / 8 additions
    // in sequence.
    CHECK(error_of(result, a, b, b_is_kn, s) <= (exact ? 0 : s.k / 8 * std::ldexp(1.0, -22)));
    if (first.empty()) first = result;
    CHECK(std::memcmp(first.data(), result.data(), result.size() * sizeof(float)) == 0);
  });
}

}  // namespace

TEST_CASE("a matrix product from cp.async, ldmatrix and mma equals the one in fp64") {
  for (Type type : {Type::bf16, Type::fp16, Type::tf32}) {
    for (bool b_is_kn : {false, true}) {
      if (type == Type::tf32 && b_is_kn) continue;
      check_gemm(type, b_is_kn, {64, 64, 96}, true);
      check_gemm(type, b_is_kn, {37, 72, 40}, true);  // none of 37, 72 and 40 is a multiple of the tile size
      check_gemm(type, b_is_kn, {70, 64, 128}, false);
    }
  }
}

TEST_CASE("one mma takes and gives its fragments as documented") {
  for (Type type : {Type::bf16, Type::fp16, Type::tf32}) {
    INFO("type " << static_cast<int>(type));
    const Shape s{16, 8, type == Type::tf32 ? 8 : 16};
    std::mt19937 random(3);
    const Matrix a(exact_values(s.m * s.k, random), type), b(exact_values(s.k * s.n, random), type);
    DeviceArray<uint16_t> a16(a.bits16), b16(b.bits16);
    DeviceArray<float> a32(a.fp32), b32(b.fp32);
    in_every_order([&] {
      DeviceArray<float> c(std::vector<float>(s.m * s.n, kNaN));
      if (type == Type::tf32) {
        REQUIRE(text(one_mma(type, a32.data(), b32.data(), c.data())) == "");
      } else {
        REQUIRE(text(one_mma(type, a16.data(), b16.data(), c.data())) == "");
      }
      CHECK(error_of(c.to_host(), a, b, true, s) == 0);
    });
  }
}

TEST_CASE("TF32 operands count without their lower 13 bits") {
  std::vector<float> a(16 * 8), b(8 * 8);
  for (int i = 0; i < 8; ++i) {
    a[i * 8 + i] = float_of(0x3f801fff);  // 1 + 2^-10 - 2^-23, which TF32 truncates to 1
    b[i * 8 + i] = 1;
  }
  DeviceArray<float> device_a(a), device_b(b), c(std::vector<float>(16 * 8, kNaN));
  REQUIRE(text(one_mma(Type::tf32, device_a.data(), device_b.data(), c.data())) == "");
  const std::vector<float> result = c.to_host();
  for (int i = 0; i < 16 * 8; ++i) CHECK(result[i] == (i < 64 && i % 9 == 0 ? 1.f : 0.f));
}

TEST_CASE("to_tf32 rounds to ten bits of mantissa, ties away from zero") {
  const std::vector<uint32_t> in{0x3f800fff, 0x3f801000, 0xbf801000, 0x3f803000,
                                 0x7f7fffff, 0xff800000, 0x00001000, 0x80000000};
  const std::vector<uint32_t> expected{0x3f800000, 0x3f802000, 0xbf802000, 0x3f804000,
                                       0x7f800000, 0xff800000, 0x00002000, 0x80000000};
  DeviceArray<uint32_t> device_in(in), out(std::vector<uint32_t>(in.size(), 7));
  REQUIRE(text(round_to_tf32(device_in.data(), out.data(), static_cast<int>(in.size()))) == "");
  CHECK(out.to_host() == expected);
}

TEST_CASE("cp.async copies what it is told to and fills up with zeros") {
  std::mt19937 random(1);
  for (int bytes : {4, 8, 16}) {
    INFO(bytes << " bytes");
    std::vector<unsigned char> in(128 * 16), expected(128 * 16, 0xff);
    std::vector<int> from_bytes(128);
    for (auto& x : in) x = static_cast<unsigned char>(random() % 255 + 1);
    for (int i = 0; i < 128; ++i) {
      from_bytes[i] = i % (bytes + 1);
      for (int j = 0; j < bytes; ++j) expected[i * 16 + j] = j < from_bytes[i] ? in[i * 16 + j] : 0;
    }
    DeviceArray<unsigned char> device_in(in);
    DeviceArray<int> device_from(from_bytes);
    in_every_order([&] {
      DeviceArray<unsigned char> out(std::vector<unsigned char>(128 * 16, 0xff));
      REQUIRE(text(copy_async(bytes, device_in.data(), device_from.data(), out.data())) == "");
      CHECK(out.to_host() == expected);
    });
  }
}

TEST_CASE("ldmatrix gives each lane its two values of each matrix") {
  std::vector<uint16_t> in(4 * 64);
  for (int i = 0; i < 4 * 64; ++i) in[i] = static_cast<uint16_t>(1000 + i);
  DeviceArray<uint16_t> device_in(in);
  for (int count : {1, 2, 4}) {
    for (bool trans : {false, true}) {
      INFO(count << " matrices, transposed: " << trans);
      std::vector<uint32_t> expected(32 * count);
      for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < count; ++i) {
          const int row = lane / 4, column = lane % 4 * 2;
          const auto at = [&](int r, int c) {
            return uint32_t{in[i * 64 + (trans ? c * 8 + r : r * 8 + c)]};
          };
          expected[lane * count + i] = at(row, column) | at(row, column + 1) << 16;
        }
      }
      in_every_order([&] {
        DeviceArray<uint32_t> out(std::vector<uint32_t>(32 * count, 7));
        REQUIRE(text(matrices(count, trans, device_in.data(), out.data())) == "");
        CHECK(out.to_host() == expected);
      });
    }
  }
}

TEST_CASE("named barriers: two warps fill a ring that two others empty") {
  for (int chunks : {1, 2, 7}) {
    std::vector<float> in(chunks * 64), expected(64);
    for (int i = 0; i < chunks * 64; ++i) {
      in[i] = static_cast<float>(i * 37 % 101);
      expected[i % 64] += in[i];
    }
    DeviceArray<float> device_in(in);
    in_every_order([&] {
      DeviceArray<float> out(std::vector<float>(64, kNaN));
      REQUIRE(text(ring(device_in.data(), chunks, out.data())) == "");
      CHECK(out.to_host() == expected);
    });
  }
}

TEST_CASE("named barriers: what a warp has seen it passes on when it arrives") {
  std::vector<float> in(32), expected(32);
  for (int i = 0; i < 32; ++i) in[i] = expected[31 - i] = static_cast<float>(i + 1);
  DeviceArray<float> device_in(in);
  in_every_order([&] {
    DeviceArray<float> out(std::vector<float>(32, kNaN));
    REQUIRE(text(relay(device_in.data(), out.data())) == "");
    CHECK(out.to_host() == expected);
  });
}
