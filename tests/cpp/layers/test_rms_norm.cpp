#include "catch.h"

#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/ops.h>

using at::Tensor;
using shoestring::RMSNormOptions;

namespace {

Tensor plain(const Tensor& x, const Tensor& weight, double eps, double offset) {
  return x * at::rsqrt(x.square().mean(-1, true) + eps) * (weight + offset);
}

}  // namespace

TEST_CASE("rms_norm takes a weight of another type, or none, and refuses a wrong one", "[rms_norm]") {
  const Tensor x = torch::randn({5, 64}).to(at::kBFloat16), weight = torch::rand({64});
  const Tensor y = shoestring::rms_norm(x, weight, RMSNormOptions(1e-6).upcast("gemma"));
  CHECK(y.scalar_type() == at::kBFloat16);
  CHECK(at::allclose(y, plain(x.to(at::kFloat), weight, 1e-6, 0).to(at::kBFloat16), 1e-2, 1e-2));
  CHECK(at::allclose(shoestring::rms_norm(x.to(at::kDouble), std::nullopt, RMSNormOptions(1e-6)),
                     plain(x.to(at::kDouble), at::ones({}, at::kDouble), 1e-6, 0)));
  CHECK_THROWS_WITH(shoestring::rms_norm(x, torch::rand({3}), RMSNormOptions(1e-6)),
                    Catch::Matchers::Contains("rms_norm: weight: expected (64)"));
}

TEST_CASE("rms_norm rounds rows of fp32 to out_dtype, and refuses a wider one", "[rms_norm]") {
  const Tensor x = torch::randn({5, 70}), weight = torch::rand({70}), branch = x.to(at::kBFloat16);
  const auto narrow = RMSNormOptions(1e-6).out_dtype(at::kBFloat16);
  const Tensor y = shoestring::rms_norm(x, weight, narrow);
  CHECK(at::equal(y, shoestring::rms_norm(x, weight, RMSNormOptions(1e-6)).to(at::kBFloat16)));
  const auto [normed, sum] = shoestring::add_rms_norm(branch, x, weight, narrow);
  CHECK(at::equal(sum, branch + x));
  CHECK(at::equal(normed, shoestring::rms_norm(sum, weight, narrow)));
  CHECK_THROWS_WITH(shoestring::rms_norm(branch, weight, RMSNormOptions(1e-6).out_dtype(at::kFloat)),
                    Catch::Matchers::Contains("rms_norm: out_dtype: expected None, BFloat16"));
}
