#include <ATen/ATen.h>

#include <shoestring/ops.h>

#include "catch.h"

using shoestring::dequantize_state_4bit;
using shoestring::quantize_state_4bit;

TEST_CASE("4-bit state keeps the largest of each group and the order of the others") {
  at::manual_seed(1);
  for (const bool is_signed : {true, false}) {
    const int64_t group = is_signed ? 32 : 128;
    at::Tensor x = at::rand({1000}) + 0.01;
    if (is_signed) x = x - 0.5;
    const auto [codes, scale] = quantize_state_4bit(x, is_signed);
    REQUIRE(codes.numel() == 512);
    REQUIRE(scale.numel() == 1024 / group);
    const at::Tensor back = dequantize_state_4bit(codes, scale, is_signed, 1000);
    const at::Tensor largest = at::constant_pad_nd(x, {0, 24}).view({-1, group}).abs().amax(1);
    CHECK(scale.abs().equal(largest));
    const at::Tensor error = (back - x).abs() / largest.repeat_interleave(group).slice(0, 0, 1000);
    CHECK(error.max().item<float>() < (is_signed ? 0.34 : 0.25));
    CHECK(error.mean().item<float>() < 0.1);
  }
}

TEST_CASE("4-bit state takes turns in rounding from step to step") {
  const at::Tensor x = at::full({256}, 0.7);
  x.slice(0, 0, 256, 128) = 1;
  at::Tensor mean = at::zeros({256});
  for (int64_t step = 0; step < 64; ++step) {
    const auto [codes, scale] = quantize_state_4bit(x, false, step);
    mean += dequantize_state_4bit(codes, scale, false, 256) / 64;
  }
  CHECK((mean - x).abs().max().item<float>() < 0.03);
  const auto [codes, scale] = quantize_state_4bit(x, false);
  CHECK((dequantize_state_4bit(codes, scale, false, 256) - x).abs().max().item<float>() > 0.08);
}

TEST_CASE("4-bit state refuses what does not fit") {
  const auto [codes, scale] = quantize_state_4bit(at::ones({300}), true);
  CHECK_THROWS_WITH(dequantize_state_4bit(codes, scale, false, 300),
                    Catch::Contains("scale: expected fp32 of shape (4)"));
}
