#include "catch.h"

#include <ATen/ATen.h>

#include <shoestring/ops.h>

#include "capabilities.h"

using at::Tensor;
using shoestring::QuantizeOptions;

TEST_CASE("quantize_4bit gives the documented bytes on every capability", "[quantize_4bit]") {
  for_each_capability([&](const char* capability) {
    CAPTURE(capability);
    // Expected NF4 codes: 1 has code 15, -1 has code 0, and 0 has code 7. An element with even index is in
    // the upper four bits of its byte. If the number of elements is odd, the last byte also holds the code of
    // zero.
    auto [packed, absmax] = shoestring::quantize_4bit(at::tensor({2.f, -2.f, 0.f, 1.4f, 0.f}));
    CHECK(at::equal(packed, at::tensor({0xf0, 0x7e, 0x77}, at::kByte)));
    CHECK(at::equal(absmax, at::tensor({2.f})));
    auto [zeros, scales] = shoestring::quantize_4bit(at::zeros({64}));
    CHECK(at::equal(zeros, at::full({32}, 0x77, at::kByte)));
    CHECK(at::equal(scales, at::zeros({1})));
    Tensor fp4 = std::get<0>(
        shoestring::quantize_4bit(at::tensor({12.f, -12.f, 8.f, 0.f}), QuantizeOptions().quant_type("fp4")));
    CHECK(at::equal(fp4, at::tensor({0x3b, 0x20}, at::kByte)));
  });
}

TEST_CASE("dequantize_4bit agrees between capabilities, dtypes and forms", "[quantize_4bit]") {
  const std::string before = shoestring::cpu_capability();
  at::manual_seed(5);
  for (int64_t block : {32, 64, 4096}) {
    // These numbers of elements give odd lengths, a last block with one element, and more blocks than a group
    // of nested scales has.
    for (int64_t numel : {1, 63, 4097, 64 * 300 + 5}) {
      const auto options = QuantizeOptions().block_size(block);
      Tensor x = at::randn({numel});
      shoestring::set_cpu_capability("plain");
      auto [packed, absmax] = shoestring::quantize_4bit(x, options);
      auto [codes, nested] = shoestring::quantize_absmax(absmax);
      Tensor exact = shoestring::dequantize_4bit(packed, absmax, {numel}, at::kFloat, std::nullopt, options);
      Tensor doubly = shoestring::dequantize_4bit(packed, codes, {numel}, at::kFloat, nested, options);
      // In units of the scale, the largest rounding error is 0.152, half of the widest interval between
      // neighbouring values of NF4.
      CHECK((exact - x).abs().max().item<float>() <= 0.16f * absmax.max().item<float>());
      CHECK((doubly - exact).norm().item<double>() <= 0.02 * exact.norm().item<double>() + 1e-6);
      for (const char* capability : {"avx2", "avx512"}) {
        if (!shoestring::set_cpu_capability(capability)) continue;
        CAPTURE(capability, block, numel);
        auto [again, scales] = shoestring::quantize_4bit(x, options);
        CHECK(at::equal(again, packed));
        CHECK(at::equal(scales, absmax));
        CHECK(at::equal(shoestring::dequantize_4bit(packed, codes, {numel}, at::kFloat, nested, options),
                        doubly));
        for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
          Tensor y = shoestring::dequantize_4bit(packed, absmax, {numel}, dtype, std::nullopt, options);
          CHECK(at::equal(y, exact.to(dtype)));
        }
      }
    }
  }
  shoestring::set_cpu_capability(before);
}

TEST_CASE("int4 is fitted alike by every capability, and better than NF4", "[quantize_4bit]") {
  const std::string before = shoestring::cpu_capability();
  const auto int4 = QuantizeOptions().quant_type("int4");
  at::manual_seed(7);
  const Tensor x = at::randn({64 * 300 + 5});
  shoestring::set_cpu_capability("plain");
  const auto [packed, absmax] = shoestring::quantize_4bit(x, int4);
  REQUIRE(absmax.scalar_type() == at::kInt);
  const Tensor exact = shoestring::dequantize_4bit(packed, absmax, x.sizes(), at::kFloat, std::nullopt, int4);
  const auto [codes, scales] = shoestring::quantize_4bit(x);
  const Tensor nf4 = shoestring::dequantize_4bit(codes, scales, x.sizes(), at::kFloat);
  CHECK((exact - x).square().mean().item<double>() < 0.84 * (nf4 - x).square().mean().item<double>());
  for (const char* capability : {"avx2", "avx512"}) {
    if (!shoestring::set_cpu_capability(capability)) continue;
    CAPTURE(capability);
    const auto [again, other] = shoestring::quantize_4bit(x, int4);
    CHECK(at::equal(again, packed));
    CHECK(at::equal(other, absmax));
    for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      CHECK(at::equal(shoestring::dequantize_4bit(packed, absmax, x.sizes(), dtype, std::nullopt, int4),
                      exact.to(dtype)));
    }
  }
  shoestring::set_cpu_capability(before);
  // The value of an int4 code is (code - 8) * scale + offset. Here the scale is 0.5 and the offset is -1,
  // both in bf16.
  const Tensor halves = at::tensor({static_cast<int32_t>(0xbf803f00)}, at::kInt),
               bytes = at::tensor({0x08, 0xf0}, at::kByte);
  const Tensor y = shoestring::dequantize_4bit(bytes, halves, {3}, at::kFloat, std::nullopt, int4);
  CHECK(at::equal(y, at::tensor({-5.f, -1.f, 2.5f})));
}

TEST_CASE("4-bit operators refuse what does not fit", "[quantize_4bit]") {
  using Catch::Matchers::Contains;
  CHECK_THROWS_WITH(shoestring::quantize_4bit(at::ones({4}), QuantizeOptions().block_size(48)),
                    Contains("block_size: expected a power of two from 32 to 4096, received 48"));
  CHECK_THROWS_WITH(shoestring::quantize_4bit(at::ones({4}, at::kDouble)),
                    Contains("expected fp32, bf16 or fp16"));
  auto [packed, absmax] = shoestring::quantize_4bit(at::ones({64}));
  CHECK_THROWS_WITH(shoestring::dequantize_4bit(packed, absmax, {66}, at::kFloat),
                    Contains("packed: expected 33 bytes"));
}
