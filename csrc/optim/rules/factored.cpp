#include "optim/rules/factored.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "optim/split/boxes.h"
#include "optim/split/split_params.h"

namespace shoestring::optim::ops {
namespace {

// Returns the shape of the whole parameter with one dimension set to 1: the last dimension if dim is 1, the
// second to last if dim is 2. Returns (0) for vectors.
template <int dim>
std::vector<int64_t> reduced(const Tensor& param) {
  auto shape = whole_sizes(param).vec();
  if (shape.size() < 2) return {0};
  shape[shape.size() - dim] = 1;
  return shape;
}

std::vector<int64_t> elements(const Tensor& param) {
  return whole_sizes(param).size() < 2 ? param.sizes().vec() : std::vector<int64_t>{0};
}

// Calls visit(elements, row, col) for the elements of a parameter that this process has, and for the rows and
// columns of the whole parameter to which they belong. A part of a parameter is visited in boxes. `of` has
// the shape of the part.
template <class Visit>
void visit_matrices(const Share& s, const Tensor& of, const Tensor& row, const Tensor& col,
                    const Visit& visit) {
  const SplitParameter* split = split_of(s.param);
  if (split == nullptr || split->begins.empty()) return visit(of, row, col);
  const auto& sizes = split->sizes;
  const int64_t rows = sizes[sizes.size() - 2], columns = sizes.back();
  const Tensor row_of = row.view({-1, rows, 1}), col_of = col.view({-1, 1, columns});
  for (const auto& [box, own] : detail::boxes_of(of, *split, rows, columns)) {
    visit(own, row_of.narrow(0, box.matrix, box.matrices).narrow(1, box.row, box.rows),
          col_of.narrow(0, box.matrix, box.matrices).narrow(2, box.column, box.columns));
  }
}

}  // namespace

Factored::Factored(const Call& call, size_t first) : means_(&call.extras[first]) {}

Squares Factored::fresh(const Share& s, const Tensor& square) const {
  if (whole_sizes(s.param).size() < 2) return {.full = square};
  Squares sums{at::zeros_like(means_[0][s.index]), at::zeros_like(means_[1][s.index])};
  visit_matrices(s, square, sums.row, sums.col, [](const Tensor& own, const Tensor& row, const Tensor& col) {
    row.add_(own.sum(-1, true));
    col.add_(own.sum(-2, true));
  });
  return sums;
}

Tensor Factored::advance(const Share& s, const Squares& fresh, const Tensor& weight, double least) const {
  if (fresh.full.defined()) {
    const Tensor& full = means_[2][s.index];
    s.advance(full, fresh.full, weight.reshape({}));
    return full.clone();
  }
  const Tensor& row = means_[0][s.index];
  const Tensor& col = means_[1][s.index];
  s.advance(row, fresh.row / col.size(-1), weight);
  s.advance(col, fresh.col / row.size(-2), weight);
  Tensor all = s.empty();
  visit_matrices(s, all, row / row.mean(-2, true).clamp_min_(least), col,
                 [](Tensor own, const Tensor& share, const Tensor& mean) { at::mul_out(own, share, mean); });
  return all;
}

}  // namespace shoestring::optim::ops

namespace shoestring::optim::detail {

std::vector<Extra> factored(const char* row, const char* col, const char* full) {
  std::vector<Extra> all{{row, ops::reduced<1>}, {col, ops::reduced<2>}};
  if (full != nullptr) all.push_back({full, ops::elements, /*is_elementwise=*/true});
  return all;
}

}  // namespace shoestring::optim::detail
