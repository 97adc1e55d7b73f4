#include "catch.h"

#include <ATen/ATen.h>

#include <shoestring/ops.h>

#include "capabilities.h"

using at::Tensor;

TEST_CASE("quantize_int8 gives the documented bytes on every capability", "[quantize_int8]") {
  for_each_capability([&](const char* capability) {
    CAPTURE(capability);
    // The scale of a row is 1/127 of its largest absolute value. Numbers half way between two codes round to
    // the even code.
    auto [packed, absmax] = shoestring::quantize_int8(
        at::tensor({127.f, -2.5f, 1.5f, 0.4f, -0.5f, 0.f, 0.f, 0.f, 0.f, 0.f}).view({2, 5}));
    CHECK(at::equal(packed, at::tensor({127, -2, 2, 0, 0, 0, 0, 0, 0, 0}, at::kChar).view({2, 5})));
    CHECK(at::equal(absmax, at::tensor({127.f, 0.f})));

    at::manual_seed(3);
    for (int64_t columns : {1, 31, 64, 1000}) {
      for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        CAPTURE(columns, dtype);
        Tensor x = at::randn({40, columns}).to(dtype);
        auto [codes, scales] = shoestring::quantize_int8(x);
        Tensor y = shoestring::dequantize_int8(codes, scales, at::kFloat);
        CHECK(at::equal(scales, x.abs().amax(1).to(at::kFloat)));
        CHECK(((y - x).abs() <= scales.unsqueeze(1) / 253).all().item<bool>());
        CHECK(at::equal(shoestring::dequantize_int8(codes, scales, dtype), y.to(dtype)));
      }
    }
  });
}

TEST_CASE("int8 operators refuse what does not fit", "[quantize_int8]") {
  using Catch::Matchers::Contains;
  CHECK_THROWS_WITH(shoestring::quantize_int8(at::ones({4}, at::kDouble)),
                    Contains("expected fp32, bf16 or fp16"));
  CHECK_THROWS_WITH(shoestring::quantize_int8(at::ones({4, 0})), Contains("one column or more"));
  auto [packed, absmax] = shoestring::quantize_int8(at::ones({2, 4}));
  CHECK_THROWS_WITH(shoestring::dequantize_int8(packed, absmax.slice(0, 1), at::kFloat),
                    Contains("absmax: expected fp32"));
}
