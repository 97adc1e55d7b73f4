#include <algorithm>
#include <numeric>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <shoestring/checkpoint/checkpoint.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

namespace {

// Blocks of 8-bit optimizer state have this many elements.
constexpr int64_t kTileElements = 256;

// Stands for x, in fp32 and without memory of its own. Its gradient is the sum of those of TileInput.
class TileSource : public torch::autograd::Function<TileSource> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x) {
    context->saved_data["dtype"] = x.scalar_type();
    return at::empty({1}, x.options().dtype(at::kFloat)).expand(x.sizes());
  }
  static variable_list backward(AutogradContext* context, const variable_list& grad) {
    return {grad[0].to(context->saved_data["dtype"].toScalarType())};
  }
};

class TileInput : public torch::autograd::Function<TileInput> {
 public:
  static Tensor forward(AutogradContext*, const Tensor& /*source*/, const Tensor& x) { return x.alias(); }
  static variable_list backward(AutogradContext*, const variable_list& grad) {
    return {grad[0].to(at::kFloat), Tensor()};
  }
};

Tensor tile_source(const Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad() && x.element_size() == 2 ? TileSource::apply(x) : x;
}

Tensor tile_input(const Tensor& x, const Tensor& source) {
  return source.is_same(x) ? x : TileInput::apply(source, x.detach());
}

}  // namespace

TORCH_LIBRARY_IMPL(shoestring, CompositeImplicitAutograd, m) {
  m.impl("_tile_source", [](const Tensor& x) { return tile_source(x); });
  m.impl("_tile_input", [](const Tensor& x, const Tensor& source) { return tile_input(x, source); });
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_tile_rows", [](int64_t rows, int64_t columns, int64_t tiles) {
    return shoestring::tile_rows(rows, columns, tiles);
  });
}

}  // namespace shoestring::detail

namespace shoestring {

std::vector<int64_t> tile_rows(int64_t rows, int64_t columns, int64_t tiles) {
  detail::check_tiles("tile_rows", tiles, rows, "rows");
  const int64_t unit = detail::kTileElements / std::gcd(detail::kTileElements, columns);
  std::vector<int64_t> begins;
  for (const int64_t step : {unit, int64_t{1}}) {
    begins.clear();
    for (int64_t i = 0; i < tiles; ++i) begins.push_back(rows * i / tiles / step * step);
    begins.push_back(rows);
    if (std::adjacent_find(begins.begin(), begins.end()) == begins.end()) break;
  }
  return begins;
}

Tensor tiled_outputs(const std::vector<std::function<Tensor(const Tensor&)>>& tiles, const Tensor& x) {
  const Tensor source = detail::tile_source(x);
  std::vector<Tensor> outputs;
  for (const auto& tile : tiles) outputs.push_back(tile(detail::tile_input(x, source)));
  return at::cat(outputs, -1);
}

}  // namespace shoestring
