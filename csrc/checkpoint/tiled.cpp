#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <shoestring/checkpoint/checkpoint.h>

using at::Tensor;

namespace shoestring::detail {

void check_tiles(const char* op, int64_t tiles, int64_t length, const char* what) {
  TORCH_CHECK(tiles >= 1 && tiles <= length, op, ": tiles: expected 1 to the number of ", what, " (", length,
              "), received ", tiles);
}

Tensor joined(const std::vector<Tensor>& parts, int64_t dim, const Tensor& x) {
  Tensor all = at::cat(parts, dim);
  TORCH_CHECK(all.size(dim) == x.size(dim), "tiled: fn: expected results as long along dim ", dim,
              " as their tiles, ", x.size(dim), " in all, received ", all.size(dim));
  return all;
}

std::vector<std::vector<Tensor>> tiles_of(const std::vector<std::pair<Tensor, int64_t>>& weights,
                                          int64_t tiles) {
  TORCH_CHECK(!weights.empty(), "tiled_features: weights: expected at least one");
  const int64_t length = weights[0].first.size(weights[0].second);
  check_tiles("tiled_features", tiles, length, "features");
  std::vector<std::vector<Tensor>> all(tiles);
  for (const auto& [weight, dim] : weights) {
    TORCH_CHECK(weight.size(dim) == length,
                "tiled_features: weights: expected weights of the same size along their dims, received ",
                length, " and ", weight.size(dim));
    const auto pieces = weight.tensor_split(tiles, dim);
    for (int64_t i = 0; i < tiles; ++i) all[i].push_back(pieces[i]);
  }
  return all;
}

Tensor added(const Tensor& total, const Tensor& part) {
  if (!total.defined()) return part.element_size() == 2 ? part.to(at::kFloat) : part;
  return at::add(total, part);
}

}  // namespace shoestring::detail
