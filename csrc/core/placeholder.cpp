#include <limits>

#include <ATen/Functions.h>

#include <shoestring/core/placeholder.h>

namespace shoestring {

at::Tensor placeholder(at::IntArrayRef shape, at::ScalarType dtype) {
  const double value = at::isFloatingType(dtype) ? std::numeric_limits<double>::quiet_NaN() : 0;
  return at::full({}, value, dtype).expand(shape);
}

}  // namespace shoestring
