// Sums over all dimensions but the last: the gradient of a bias. PyTorch's sum of a 16-bit tensor first makes
// a copy in fp32.

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "core/column_sums_table.h"
#include "core/tensors.h"
#include "core/threads.h"

namespace shoestring {
namespace {

using at::Tensor;

// The rows are added in at most kParts parts, of kLeastRows rows or more. The division does not depend on the
// number of threads. Longer sums are divided into parts of kMostRows rows, which keeps the rounding error
// small.
constexpr int64_t kParts = 64, kLeastRows = 16, kMostRows = 1024;

void add_columns(const Tensor& x, int64_t first, int64_t rows, float* sums) {
  const auto& k = cpu::column_sums();
  const int64_t columns = x.size(1), offset = first * columns;
  const void* data = x.const_data_ptr();
  if (x.scalar_type() == at::kFloat)
    return k.of_float(static_cast<const float*>(data) + offset, rows, columns, sums);
  (x.scalar_type() == at::kBFloat16 ? k.of_bf16 : k.of_fp16)(static_cast<const uint16_t*>(data) + offset,
                                                             rows, columns, sums);
}

void check_columns(const Tensor& x) {
  TORCH_CHECK(is_supported_float(x.scalar_type()) && x.scalar_type() != at::kDouble && x.dim() >= 1,
              "_column_sums: x: expected (..., features) of fp32, bf16 or fp16, received ", x.sym_sizes(),
              " of ", x.scalar_type());
}

Tensor column_sums_cpu(const Tensor& x) {
  check_columns(x);
  const int64_t columns = x.size(-1);
  const Tensor rows = x.reshape({columns == 0 ? 0 : x.numel() / columns, columns}).contiguous();
  Tensor out = at::zeros({columns}, x.options().dtype(at::kFloat));
  const int64_t count = rows.size(0);
  if (rows.numel() == 0) return out;
  const int64_t each = std::clamp((count + kParts - 1) / kParts, kLeastRows, kMostRows);
  const int64_t parts = (count + each - 1) / each;
  float* total = out.mutable_data_ptr<float>();
  if (parts == 1) {
    add_columns(rows, 0, count, total);
    return out;
  }
  const Tensor part_sums = at::zeros({parts, columns}, out.options());
  float* sums = part_sums.mutable_data_ptr<float>();
  const int64_t bytes = columns * static_cast<int64_t>(x.element_size()) * each;
  at::parallel_for(0, parts, row_grain(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part)
      add_columns(rows, part * each, std::min(each, count - part * each), sums + part * columns);
  });
  add_columns(part_sums, 0, parts, total);
  return out;
}

Tensor column_sums_else(const Tensor& x) {
  check_columns(x);
  return x.reshape_symint({-1, x.sym_size(-1)}).sum({0}, /*keepdim=*/false, at::kFloat);
}

Tensor column_sums_meta(const Tensor& x) {
  check_columns(x);
  return at::empty_symint({x.sym_size(-1)}, x.options().dtype(at::kFloat));
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl("_column_sums", column_sums_cpu); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl("_column_sums", column_sums_else); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl("_column_sums", column_sums_meta); }

}  // namespace
}  // namespace shoestring
