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

Factored::Factored(const Call& call, const char* row, const char* col, const char* full)
    : row_(extra(call, row, reduced<1>)), col_(extra(call, col, reduced<2>)) {
  if (full != nullptr) full_ = extra(call, full, whole);
}

Tensor Factored::advance(const Share& s, Tensor square, const Tensor& weight, double least) const {
  if (s.param.dim() < 2) {
    s.advance(full_[s.index], square, weight.reshape({}));
    return square.copy_(full_[s.index]);
  }
  const Tensor& row = row_[s.index];
  const Tensor& col = col_[s.index];
  s.advance(row, square.mean(-1, true), weight);
  s.advance(col, square.mean(-2, true), weight);
  return at::mul_out(square, row / row.mean(-2, true).clamp_min_(least), col);
}

std::vector<Moment> optional_mean(const Call& call, double beta1) {
  const auto exp_avg = call.optional("exp_avg");
  TORCH_CHECK(exp_avg.has_value() == (beta1 > 0), call.op,
              ": exp_avg: expected a tensor where beta1 is above 0, and ",
              "None where it is 0, received beta1 ", beta1, " and ", exp_avg ? "a tensor" : "None");
  if (!exp_avg) return {};
  return {{"exp_avg", true, *exp_avg, call.optional("exp_avg_scale")}};
}

}  // namespace shoestring::optim::ops

namespace shoestring::optim::detail {

std::vector<Extra> factored(const Tensor& param, const char* row, const char* col, const char* full) {
  std::vector<Extra> all{{row, ops::reduced<1>(param)}, {col, ops::reduced<2>(param)}};
  if (full != nullptr) all.push_back({full, ops::whole(param)});
  return all;
}

}  // namespace shoestring::optim::detail
