// Tests the functions of cuda/core/hopper.h and wgmma.h. The file is built twice, with the emulator and with
// nvcc for a GPU. On a GPU other than Hopper the tests are skipped.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "catch2.h"
#include "device_array.h"
#include "kernels/hopper.h"

using namespace simt_tests;

namespace {

std::string text(const char* error) { return error == nullptr ? "" : error; }

bool hopper_here() {
#if defined(CUDART_VERSION)
  int device = 0, major = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != 9) WARN("not run: this GPU is no Hopper");
  return major == 9;
#else
  return true;
#endif
}

template <class Check>
void in_every_order(Check check) {
#if defined(CUDART_VERSION)
  for (int i = 0; i < 2; ++i) check();
#else
  for (int order = 0; order < 4; ++order) {
    INFO("order " << order);
    simt::set_order(order);
    check();
  }
  simt::set_order(0);
#endif
}

// A matrix of random multiples of 1/32 up to 4. They are exact in bf16 and fp16, and every sum of up to 200
// of their products is exact in fp32.
struct Matrix {
  std::vector<float> exact;
  std::vector<uint16_t> bits;
  Matrix(size_t n, Type type, std::mt19937& random) {
    for (size_t i = 0; i < n; ++i) {
      const float x = static_cast<float>(static_cast<int>(random() % 257) - 128) / 32;
      uint32_t u;
      std::memcpy(&u, &x, 4);
      const auto half = static_cast<_Float16>(x);
      uint16_t b;
      std::memcpy(&b, &half, 2);
      exact.push_back(x);
      bits.push_back(type == Type::bf16 ? static_cast<uint16_t>(u >> 16) : b);
    }
  }
};

}  // namespace

TEST_CASE("a matrix product from tensor copies, mbarriers and wgmma is exact") {
  if (!hopper_here()) return;
  struct Shape {
    Type type;
    int columns, m, n, k;
  };
  for (const Shape s : {Shape{Type::fp16, 64, 70, 72, 200}, Shape{Type::fp16, 128, 64, 136, 64},
                        Shape{Type::fp16, 96, 30, 104, 72}, Shape{Type::fp16, 48, 70, 104, 136},
                        Shape{Type::bf16, 192, 130, 200, 136}, Shape{Type::bf16, 256, 40, 264, 72}}) {
    for (bool b_is_kn : {false, true}) {
      for (bool a_in_registers : {false, true}) {
        INFO("type " << static_cast<int>(s.type) << ", columns " << s.columns << ", b (k, n): " << b_is_kn
                     << ", registers: " << a_in_registers);
        std::mt19937 random(s.m + s.n);
        const Matrix a(s.m * s.k, s.type, random), b(s.n * s.k, s.type, random);
        std::vector<float> expected(s.m * s.n);
        for (int i = 0; i < s.m; ++i) {
          for (int j = 0; j < s.n; ++j) {
            for (int l = 0; l < s.k; ++l) {
              expected[i * s.n + j] += a.exact[i * s.k + l] * b.exact[b_is_kn ? l * s.n + j : j * s.k + l];
            }
          }
        }
        DeviceArray<uint16_t> device_a(a.bits), device_b(b.bits);
        in_every_order([&] {
          DeviceArray<float> c(std::vector<float>(s.m * s.n, std::nanf("")));
          const TileGemm problem{
              s.type, b_is_kn, a_in_registers, s.columns, device_a.data(), device_b.data(), c.data(), s.m,
              s.n,    s.k};
          REQUIRE(text(tile_gemm(problem)) == "");
          CHECK(c.to_host() == expected);
        });
      }
    }
  }
}

TEST_CASE("wgmma reads what threads have written and fenced") {
  if (!hopper_here()) return;
  std::mt19937 random(5);
  const Matrix a(64 * 64, Type::fp16, random), b(64 * 64, Type::fp16, random);
  std::vector<float> expected(64 * 64);
  for (int i = 0; i < 64 * 64; ++i) {
    for (int l = 0; l < 64; ++l) expected[i] += a.exact[i / 64 * 64 + l] * b.exact[i % 64 * 64 + l];
  }
  DeviceArray<uint16_t> device_a(a.bits), device_b(b.bits);
  in_every_order([&] {
    DeviceArray<float> c(std::vector<float>(64 * 64, std::nanf("")));
    REQUIRE(text(written_gemm(device_a.data(), device_b.data(), c.data())) == "");
    CHECK(c.to_host() == expected);
  });
}

TEST_CASE("a tensor copy takes its box and zeros for what lies outside") {
  if (!hopper_here()) return;
  std::vector<uint16_t> in(3 * 5 * 72);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i + 1);
  DeviceArray<uint16_t> device_in(in);
  struct At {
    int column, row, slice;
  };
  for (const At at :
       {At{0, 0, 0}, At{8, 1, 1}, At{16, 3, 2}, At{64, 0, 1}, At{80, 0, 0}, At{0, -2, -1}, At{0, 9, 0}}) {
    INFO("at " << at.column << ", " << at.row << ", " << at.slice);
    std::vector<uint16_t> expected(2 * 4 * 64);
    for (int i = 0; i < 2 * 4 * 64; ++i) {
      const int column = at.column + i % 64, row = at.row + i / 64 % 4, slice = at.slice + i / 256;
      const bool inside = column < 72 && row >= 0 && row < 5 && slice >= 0 && slice < 3;
      expected[i] = inside ? in[(slice * 5 + row) * 72 + column] : 0;
    }
    in_every_order([&] {
      DeviceArray<uint16_t> out(std::vector<uint16_t>(2 * 4 * 64, 7));
      REQUIRE(text(box(device_in.data(), at.column, at.row, at.slice, out.data())) == "");
      CHECK(out.to_host() == expected);
    });
  }
}

TEST_CASE("tensor maps that a copy cannot take are refused") {
  if (!hopper_here()) return;
  DeviceArray<uint16_t> in(std::vector<uint16_t>(4096));
  const int64_t sizes[] = {64, 8, 1}, strides[] = {128, 1024}, odd[] = {136, 1096}, none[] = {0, 1024},
                inside[] = {128, 16}, empty[] = {64, 0, 1};
  const int extent[] = {64, 8, 1}, wide[] = {128, 8, 1}, tall[] = {64, 257, 1};
  CHECK(map_error(in.data(), 3, sizes, strides, extent) == nullptr);
  CHECK(map_error(in.data() + 4, 3, sizes, strides, extent) != nullptr);
  CHECK(map_error(in.data(), 3, sizes, odd, extent) != nullptr);
  CHECK(map_error(in.data(), 3, empty, strides, extent) != nullptr);
  CHECK(map_error(in.data(), 3, sizes, strides, wide) != nullptr);
  CHECK(map_error(in.data(), 3, sizes, strides, tall) != nullptr);
#if !defined(CUDART_VERSION)
  // These are tested only with the emulator, because a CUDA driver may accept them: a stride of 0, and a
  // dimension of size 1 whose stride lies inside the next dimension.
  CHECK(map_error(in.data(), 3, sizes, none, extent) != nullptr);
  CHECK(map_error(in.data(), 3, sizes, inside, extent) != nullptr);
#else
  static_cast<void>(none), static_cast<void>(inside);
#endif
}
