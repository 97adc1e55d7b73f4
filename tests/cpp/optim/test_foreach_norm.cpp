#include "catch.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "emulated.h"

using at::Tensor;

TEST_CASE("foreach_norm is the norm of each tensor, whatever their types", "[foreach_norm]") {
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("shoestring::foreach_norm", "")
                      .typed<Tensor(at::TensorList)>();
  const std::vector<Tensor> tensors = {at::randn({100, 33}), at::randn({20000}).to(at::kBFloat16),
                                       at::randn({0}), at::randn({30, 40}).t().to(at::kHalf)};
  // With the emulator, the norms are computed by at::_foreach_norm, whose fp32 sums may have an error of
  // 1e-5. The error of the CPU kernel is little more than the rounding of the result.
  const double bound = is_emulated() ? 1e-5 : 2e-7;
  const Tensor norms = op.call(tensors);
  CHECK(norms.scalar_type() == at::kFloat);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const double exact = tensors[i].to(at::kDouble).norm().item<double>();
    CHECK(std::abs(norms[static_cast<int64_t>(i)].item<double>() - exact) <= bound * exact);
  }
}
