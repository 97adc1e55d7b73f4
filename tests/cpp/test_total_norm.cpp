#include "catch.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>

using at::Tensor;

TEST_CASE("total_norm is the norm of all gradients together, whatever their types", "[total_norm]") {
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("shoestring::total_norm", "")
                      .typed<Tensor(at::TensorList)>();
  const std::vector<Tensor> grads = {at::randn({100, 33}), at::randn({20000}).to(at::kBFloat16), at::randn({0}),
                                     at::randn({30, 40}).t().to(at::kHalf)};
  Tensor squares = at::zeros({}, at::kDouble);
  for (const Tensor& g : grads) squares += g.to(at::kDouble).square().sum();
  const Tensor norm = op.call(grads);
  CHECK(norm.scalar_type() == at::kFloat);
  const double exact = squares.sqrt().item<double>();
  CHECK(std::abs(norm.item<double>() - exact) < 2e-7 * exact);
}
