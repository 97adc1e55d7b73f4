#include <shoestring/layers/stochastic_depth.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "core/device.h"
#include "core/philox.h"

namespace shoestring::layers {
namespace {

using at::Tensor;

constexpr const char* kStochasticDepthOp = "stochastic_depth";

// The top bit of the step, which no step has, keeps the counters apart from those of other random numbers
// with the same seed.
kernels::Random4 depth_bits(int64_t seed, int64_t step, int64_t layer, uint32_t index) {
  return kernels::philox_at(static_cast<uint64_t>(seed), static_cast<uint64_t>(step) | uint64_t{1} << 63,
                            static_cast<uint64_t>(layer) << 32 | index);
}

uint64_t joined_words(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }

// Returns (1 - p) rows, rounded up or down so that its expected value is exact.
int64_t kept_count(int64_t seed, int64_t step, int64_t layer, double p, int64_t rows) {
  const kernels::Random4 drawn = depth_bits(seed, step, layer, 0xffffffffu);
  const double uniform = static_cast<double>(joined_words(drawn.value[0], drawn.value[1]) >> 11) * 0x1p-53;
  return std::min(rows, static_cast<int64_t>((1 - p) * static_cast<double>(rows) + uniform));
}

// The kept rows are those with the smallest random numbers, in ascending order.
std::vector<int64_t> kept_rows(int64_t seed, int64_t step, int64_t layer, double p, int64_t rows) {
  const auto count = static_cast<size_t>(kept_count(seed, step, layer, p, rows));
  std::vector<std::pair<uint64_t, int64_t>> drawn(static_cast<size_t>(rows));
  for (size_t i = 0; i < drawn.size(); i += 2) {
    const kernels::Random4 bits = depth_bits(seed, step, layer, static_cast<uint32_t>(i / 2));
    drawn[i] = {joined_words(bits.value[0], bits.value[1]), static_cast<int64_t>(i)};
    if (i + 1 == drawn.size()) break;
    drawn[i + 1] = {joined_words(bits.value[2], bits.value[3]), static_cast<int64_t>(i + 1)};
  }
  if (count < drawn.size()) {
    std::nth_element(drawn.begin(), drawn.begin() + static_cast<int64_t>(count), drawn.end());
  }
  std::vector<int64_t> row_indices(count);
  for (size_t i = 0; i < count; ++i) row_indices[i] = drawn[i].second;
  std::sort(row_indices.begin(), row_indices.end());
  return row_indices;
}

// Returns the kept rows on the device of x. The copy from pinned memory does not wait for the device.
Tensor stochastic_depth_rows(int64_t seed, int64_t step, int64_t layer, double p, int64_t rows,
                             c10::Device device) {
  TORCH_CHECK_VALUE(p >= 0 && p < 1, kStochasticDepthOp, ": p: expected a probability in [0, 1), received ",
                    p);
  TORCH_CHECK_VALUE(step >= 0, kStochasticDepthOp, ": step: expected a number of at least 0, received ",
                    step);
  TORCH_CHECK_VALUE(layer >= 0 && layer < int64_t{1} << 32, kStochasticDepthOp,
                    ": layer: expected a number in [0, 2^32), received ", layer);
  TORCH_CHECK_VALUE(rows < int64_t{1} << 32, kStochasticDepthOp,
                    ": x: expected fewer than 2^32 rows, received ", rows);
  const std::vector<int64_t> row_indices = kept_rows(seed, step, layer, p, rows);
  const bool asynchronous = is_asynchronous(device);
  Tensor on_host = at::empty({static_cast<int64_t>(row_indices.size())},
                             at::TensorOptions(at::kLong).pinned_memory(asynchronous));
  std::copy(row_indices.begin(), row_indices.end(), on_host.mutable_data_ptr<int64_t>());
  return asynchronous ? on_host.to(device, /*non_blocking=*/true) : on_host.to(device);
}

// Selects rows and keeps the memory format, which index_select does not do for channels-last tensors.
Tensor selected_rows(const Tensor& x, const Tensor& rows) {
  const auto format = x.suggest_memory_format();
  if (format != at::MemoryFormat::ChannelsLast && format != at::MemoryFormat::ChannelsLast3d) {
    return x.index_select(0, rows);
  }
  return x.movedim(1, -1).index_select(0, rows).movedim(-1, 1);
}

Tensor branch_of(const std::function<Tensor(const Tensor&)>& fn, const Tensor& x) {
  Tensor y = fn(x);
  TORCH_CHECK_VALUE(y.defined() && y.sizes() == x.sizes(), kStochasticDepthOp,
                    ": fn: expected a result of the shape of its argument, ", x.sizes(), ", received ",
                    y.defined() ? c10::str(y.sizes()) : "an undefined tensor");
  return y.to(x.scalar_type());
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Returns the rows that stochastic_depth keeps, int64 in ascending order, on the device. They depend on the
  // other arguments alone.
  m.def(R"(_stochastic_depth_rows(int seed, int step, int layer, float p, int rows,
      Device device) -> Tensor)");
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_stochastic_depth_rows", stochastic_depth_rows);
}

}  // namespace
}  // namespace shoestring::layers

namespace shoestring {

using at::Tensor;

Tensor stochastic_depth(const std::function<Tensor(const Tensor&)>& fn, const Tensor& x,
                        const StochasticDepthOptions& o) {
  const bool by_row = o.mode() == "row";
  TORCH_CHECK_VALUE(by_row || o.mode() == "batch",
                    "stochastic_depth: mode: expected \"row\" or \"batch\", received \"", o.mode(), "\"");
  TORCH_CHECK_VALUE(!by_row || x.dim() > 0,
                    "stochastic_depth: x: expected at least one dimension with mode \"row\", received 0");
  const int64_t rows = by_row ? x.size(0) : 1;
  const double p = o.training() ? o.p() : 0;
  const Tensor indices = layers::stochastic_depth_rows(o.seed(), o.step(), o.layer(), p, rows, x.device());
  if (p > 0 && indices.numel() == 0) return x.clone();
  if (indices.numel() == rows) return x.add(layers::branch_of(fn, x), 1 / (1 - p));
  const Tensor branch = layers::branch_of(fn, layers::selected_rows(x, indices));
  // index_add, out of place, would not keep the memory format.
  return x.clone().index_add_(0, indices, branch, 1 / (1 - p));
}

double stochastic_depth_rate(int64_t layer, int64_t layers, double p) {
  TORCH_CHECK_VALUE(layers >= 1 && layer >= 0 && layer < layers,
                    "stochastic_depth_rate: layer: expected a number in [0, layers), received ", layer,
                    " of ", layers);
  TORCH_CHECK_VALUE(p >= 0 && p < 1, "stochastic_depth_rate: p: expected a probability in [0, 1), received ",
                    p);
  return p * static_cast<double>(layer + 1) / static_cast<double>(layers);
}

}  // namespace shoestring
