#include <ATen/ATen.h>

#include <shoestring/ops.h>

#include "catch.h"

using shoestring::compress_gradient_;
using shoestring::compressed_gradient_bytes;
using shoestring::decompress_mean_;

namespace {

at::Tensor compressed(at::Tensor& error, const at::Tensor& gradient, int64_t bits) {
  at::Tensor codes = at::empty({compressed_gradient_bytes(gradient.numel(), bits)}, at::kByte);
  compress_gradient_(error, gradient, codes, bits);
  return codes;
}

}  // namespace

TEST_CASE("compressed gradients and errors add up to the gradients") {
  at::manual_seed(1);
  for (const int64_t bits : {8, 4, 1}) {
    at::Tensor error = at::zeros({1000}), sent = at::zeros({1000}, at::kDouble), given = sent.clone();
    at::Tensor out = at::empty({1000});
    for (int step = 0; step < 20; ++step) {
      const at::Tensor gradient = at::randn({1000}).to(at::kBFloat16);
      decompress_mean_(out, compressed(error, gradient, bits).unsqueeze(0), bits);
      sent += out;
      given += gradient;
    }
    CHECK((sent + error - given).abs().max().item<double>() < 1e-4);
    CHECK(error.abs().max().item<float>() < (bits == 8 ? 0.02 : bits == 4 ? 0.5 : 8));
  }
}

TEST_CASE("a decompressed mean is that of all ranks") {
  at::manual_seed(2);
  std::vector<at::Tensor> rows;
  at::Tensor mean = at::zeros({700});
  for (int rank = 0; rank < 3; ++rank) {
    at::Tensor error = at::zeros({700});
    const at::Tensor gradient = at::randn({700});
    mean += gradient / 3;
    rows.push_back(compressed(error, gradient, 8));
  }
  at::Tensor out = at::empty({700});
  decompress_mean_(out, at::stack(rows), 8);
  CHECK((out - mean).abs().max().item<float>() < 0.02);
}

TEST_CASE("gradients that are not finite stay visible and leave no errors") {
  at::Tensor error = at::zeros({600}), gradient = at::ones({600}), out = at::empty({600});
  gradient[300] = std::numeric_limits<float>::infinity();
  decompress_mean_(out, compressed(error, gradient, 4).unsqueeze(0), 4);
  CHECK(out.slice(0, 256, 384).isnan().all().item<bool>());
  CHECK(out.slice(0, 0, 256).isfinite().all().item<bool>());
  CHECK(error.isfinite().all().item<bool>());
}

TEST_CASE("compression of gradients refuses what does not fit") {
  at::Tensor error = at::zeros({300}), codes = at::zeros({520}, at::kByte);
  CHECK_THROWS_WITH(compress_gradient_(error, at::ones({300}, at::kInt), codes, 8),
                    Catch::Contains("gradient: expected fp32, bf16 or fp16, received Int"));
  CHECK_THROWS_WITH(compress_gradient_(error, at::ones({300}), codes, 2),
                    Catch::Contains("bits: expected 8, 4 or 1, received 2"));
  CHECK_THROWS_WITH(compress_gradient_(error, at::ones({300}), codes, 4),
                    Catch::Contains("codes: expected contiguous uint8 of shape (204)"));
  CHECK_THROWS_WITH(decompress_mean_(error, codes, 8),
                    Catch::Contains("codes: expected uint8 of shape (ranks"));
}
