#include "optim/factored.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

namespace shoestring::optim::ops {
namespace {

// Returns the parameter's shape with one dimension set to 1: the last dimension if dim is 1, the second to
// last if dim is 2. Returns (0) for vectors.
template <int dim>
std::vector<int64_t> reduced(const Tensor& param) {
  if (param.dim() < 2) return {0};
  auto shape = param.sizes().vec();
  shape[shape.size() - dim] = 1;
  return shape;
}

std::vector<int64_t> whole(const Tensor& param) {
  return param.dim() < 2 ? param.sizes().vec() : std::vector<int64_t>{0};
}

}  // namespace

Factored::Factored(const Call& call, size_t first) : means_(&call.extras[first]) {}

Tensor Factored::advance(const Share& s, Tensor square, const Tensor& weight, double least) const {
  if (s.param.dim() < 2) {
    const Tensor& full = means_[2][s.index];
    s.advance(full, square, weight.reshape({}));
    return square.copy_(full);
  }
  const Tensor& row = means_[0][s.index];
  const Tensor& col = means_[1][s.index];
  s.advance(row, square.mean(-1, true), weight);
  s.advance(col, square.mean(-2, true), weight);
  return at::mul_out(square, row / row.mean(-2, true).clamp_min_(least), col);
}

}  // namespace shoestring::optim::ops

namespace shoestring::optim::detail {

std::vector<Extra> factored(const char* row, const char* col, const char* full) {
  std::vector<Extra> all{{row, ops::reduced<1>}, {col, ops::reduced<2>}};
  if (full != nullptr) all.push_back({full, ops::whole});
  return all;
}

}  // namespace shoestring::optim::detail
