#include "quantization/base_weight.h"

#include <ATen/Functions.h>

#include "core/huge_pages.h"
#include "gemm/gemm.h"

namespace shoestring::quantization {

using at::Tensor;

namespace {

// Returns the number of rows in a panel. On the CPU a panel takes about 4 MiB in fp32, so that it is still in
// the last-level cache when the matrix product reads it. Smaller panels would cost time: for each panel, all
// threads wait for each other twice, which is slow if other programs use the CPU. On CUDA a panel has up to
// 64 MiB in the dtype of the matrix product, which fills the GPU. There all panels have about equal size, so
// that the last one is not a small remainder. On CUDA each panel starts at a multiple of 16 rows, so that the
// codes of a quantised panel start at a whole 32-bit word.
int64_t panel_rows(Backend backend, int64_t rows, int64_t columns, int64_t element_bytes) {
  const bool cuda = backend == Backend::kCuda;
  const int64_t panel_bytes = int64_t{cuda ? 64 : 4} << 20;
  const int64_t row_bytes = std::max<int64_t>(columns, 1) * (cuda ? element_bytes : sizeof(float));
  const int64_t fit = std::max<int64_t>(cuda ? 16 : 64, panel_bytes / row_bytes / 16 * 16);
  if (!cuda) return std::max<int64_t>(1, std::min(rows, fit));
  const int64_t panels = std::max<int64_t>(1, (rows + fit - 1) / fit);
  return std::max<int64_t>(1, std::min(rows, ((rows + panels - 1) / panels + 15) / 16 * 16));
}

}  // namespace

BaseWeight BaseWeight::dense(const Tensor& weight, at::ScalarType product) {
  BaseWeight base;
  base.rows_ = weight.size(0);
  base.columns_ = weight.size(1);
  base.dense_ = weight;
  const bool widen = weight.scalar_type() != product && !gemm::gemm_widens(product);
  base.step_ = widen ? panel_rows(Backend::kCpu, base.rows_, base.columns_, sizeof(float))
                     : std::max<int64_t>(base.rows_, 1);
  if (widen) base.buffer_ = at::empty({base.step_, base.columns_}, weight.options().dtype(product));
  return base;
}

BaseWeight BaseWeight::quantized(PackedReader reader, int64_t rows, int64_t columns,
                                 at::TensorOptions product) {
  BaseWeight base;
  base.rows_ = rows;
  base.columns_ = columns;
  base.step_ = panel_rows(reader.backend(), rows, columns, static_cast<int64_t>(product.dtype().itemsize()));
  base.reader_.emplace(std::move(reader));
  const bool wide = product.dtype().toScalarType() == at::kDouble;
  base.narrow_ = at::empty({base.step_, columns}, wide ? product.dtype(at::kFloat) : product);
  if (wide) base.buffer_ = at::empty({base.step_, columns}, product);
  return base;
}

Tensor BaseWeight::panel(int64_t begin, int64_t size) const {
  Tensor part;
  if (reader_.has_value()) {
    part = narrow_.narrow(0, 0, size);
    reader_->read(begin * columns_, part);
  } else {
    part = dense_.narrow(0, begin, size);
  }
  return buffer_.defined() ? buffer_.narrow(0, 0, size).copy_(part) : part;
}

Tensor apply_weight(const BaseWeight& weight, const Tensor& x, const Adaptation& adaptation,
                    at::ScalarType dtype, const gemm::Products& products) {
  const auto& [low, up, scaling, gain, bias] = adaptation;
  const int64_t tokens = x.size(0);
  const auto offset_and_scale = [](Tensor to, const Tensor& factor, const Tensor& offset) {
    if (factor.defined() && offset.defined()) {
      at::addcmul_out(to, offset, to, factor);
    } else if (factor.defined()) {
      to.mul_(factor);
    }
  };
  if (const PackedReader* packed = products.other == at::kFloat ? weight.for_few(tokens) : nullptr) {
    Tensor sum = packed->multiply(x.to(at::kFloat), weight.rows());
    if (low.defined()) gemm::gemm(sum, low, up.t(), /*beta=*/1, scaling);
    if (!gain.defined() && bias.defined()) sum.add_(bias);
    offset_and_scale(sum, gain, bias);
    return sum.to(dtype);
  }
  Tensor out = in_huge_pages(at::empty({tokens, weight.rows()}, x.options().dtype(dtype)));
  // With bf16 instructions on the CPU, the product with the weight and the low-rank product have different
  // dtypes. Their sum is then kept in fp32.
  const bool separate = low.defined() && products.weight != products.other;
  const auto type = separate ? products.other : products.weight;
  // Buffer for the product with one panel, if the product is not computed in `dtype`. The first panel is the
  // largest, so it determines the size of the buffer.
  Tensor room;
  weight.for_each_panel([&](int64_t begin, const Tensor& panel) {
    const int64_t size = panel.size(0);
    if (type != dtype && !room.defined()) room = at::empty({tokens * size}, x.options().dtype(type));
    const auto part = [&](const Tensor& t) { return t.defined() ? t.narrow(0, begin, size) : t; };
    Tensor columns = out.narrow(1, begin, size);
    Tensor to = type == dtype ? columns : room.narrow(0, 0, tokens * size).view({tokens, size});
    const Tensor offset = gain.defined() ? Tensor() : part(bias);
    if (separate) {
      gemm::gemm_rounded(to, x, panel.t());
      if (offset.defined()) to.add_(offset);
      gemm::gemm(to, low, part(up).t(), /*beta=*/1, scaling);
    } else if (low.defined()) {
      // The low-rank product is computed first. With a 16-bit result, the smaller term is rounded alone, and
      // the sum of both products is rounded once.
      gemm::multiply_into(to, products, offset, low, part(up).t(), 0, scaling);
      gemm::multiply_into(to, products, Tensor(), x, panel.t(), 1);
    } else {
      gemm::multiply_into(to, products, offset.defined() ? offset.to(type) : offset, x, panel.t(), 0);
    }
    offset_and_scale(to, part(gain), part(bias));
    if (!to.is_same(columns)) columns.copy_(to);
  });
  return out;
}

Tensor times_weight(const std::vector<GradAndWeight>& terms, int64_t tokens, int64_t columns,
                    at::TensorOptions like, const Tensor& low, const Tensor& down,
                    const gemm::Products& products) {
  // On CUDA the sum over several panels is kept in fp32. With a single term and a single panel there is no
  // such sum, because the GEMM itself accumulates in fp32.
  const bool narrow = products.backend == Backend::kCuda && terms.size() == 1 && terms[0].weight.one_panel();
  const auto wide = products.other == at::kDouble ? at::kDouble : at::kFloat;
  Tensor out = at::empty({tokens, columns}, like.dtype(narrow ? products.other : wide));
  bool first = true;
  const auto add = [&](const Tensor& a, const Tensor& b) {
    gemm::multiply_into(out, products, Tensor(), a, b, first ? 0 : 1);
    first = false;
  };
  if (low.defined()) add(low, down);
  for (const auto& [grad, gain, weight] : terms) {
    weight.for_each_panel([&, &grad = grad, &gain = gain](int64_t begin, const Tensor& panel) {
      Tensor part = grad.narrow(1, begin, panel.size(0));
      if (gain.defined()) part = part.mul(gain.narrow(0, begin, panel.size(0)));
      add(part.to(products.weight), panel);
    });
  }
  return first ? out.zero_() : out;
}

}  // namespace shoestring::quantization
