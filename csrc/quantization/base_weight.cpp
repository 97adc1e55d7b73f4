#include "quantization/base_weight.h"

#include <deque>

#include <ATen/Functions.h>

#include "core/huge_pages.h"
#include "gemm/gemm.h"
#include "gemm/packed_gemm.h"
#include "gemm/split_product.h"
#include "quantization/scaled_matrix.h"

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

// Returns the number of rows of a weight that is away which arrive at a time: about 16 MiB, so that a read is
// large and the memory is small. On the CPU the sums of a product over the rows restart where they do in a
// product of the whole weight, since the number is a multiple of the depth of every kernel (192, 384, 512).
int64_t panel_of_rows(const Tensor& weight) {
  constexpr int64_t kBytes = int64_t{16} << 20, kDepth = 1536;
  const int64_t row = std::max<int64_t>(1, weight.size(1) * weight.element_size());
  return std::max<int64_t>(1, kBytes / row / kDepth) * kDepth;
}

}  // namespace

BaseWeight BaseWeight::dense(const Tensor& weight, at::ScalarType product,
                             std::optional<at::ScalarType> rounded) {
  BaseWeight base;
  base.rows_ = weight.size(0);
  base.columns_ = weight.size(1);
  base.dense_ = weight;
  base.product_ = weight.options().dtype(product);
  base.source_ = row_source_of(weight);
  const bool away = base.source_ != nullptr;
  base.panel_type_ = away ? rounded.value_or(weight.scalar_type()) : weight.scalar_type();
  const bool widen = base.panel_type_ != product && !gemm::gemm_widens(product);
  base.step_ = away    ? panel_of_rows(weight)
               : widen ? panel_rows(Backend::kCpu, base.rows_, base.columns_, sizeof(float))
                       : std::max<int64_t>(base.rows_, 1);
  return base;
}

BaseWeight BaseWeight::quantized(PackedReader reader, int64_t rows, int64_t columns,
                                 at::TensorOptions product) {
  BaseWeight base;
  base.rows_ = rows;
  base.columns_ = columns;
  base.step_ = panel_rows(reader.backend(), rows, columns, static_cast<int64_t>(product.dtype().itemsize()));
  base.product_ = product;
  base.quantized_.emplace(std::move(reader), rows, columns);
  return base;
}

BaseWeight::Buffers BaseWeight::make_buffers() const {
  Buffers buffers;
  const auto type = product_.dtype().toScalarType();
  const int64_t rows = source_ != nullptr ? std::min(rows_, step_ + RowSource::kLeast) : step_;
  const auto make = [&](at::ScalarType dtype) { return at::empty({rows, columns_}, product_.dtype(dtype)); };
  if (quantized_.has_value()) buffers.dequantized = make(type == at::kDouble ? at::kFloat : type);
  if (quantized_.has_value() ? type == at::kDouble : panel_type_ != type && !gemm::gemm_widens(type)) {
    buffers.converted = make(type);
  }
  return buffers;
}

Tensor BaseWeight::panel(const Buffers& buffers, int64_t begin, int64_t size) const {
  Tensor part;
  if (quantized_.has_value()) {
    part = buffers.dequantized.narrow(0, 0, size);
    quantized_->reader().read(begin * columns_, part);
  } else {
    part = dense_.narrow(0, begin, size);
  }
  return converted(buffers, part);
}

Tensor BaseWeight::converted(const Buffers& buffers, const Tensor& part) const {
  return buffers.converted.defined() ? buffers.converted.narrow(0, 0, part.size(0)).copy_(part) : part;
}

namespace {

// With fewer tokens, packing a weight takes as long as multiplying.
constexpr int64_t kFewTokensToSum = 8;

// Returns whether gemm::gemm_sum() computes the products of an operator on the CPU.
bool sums(const gemm::Products& products, int64_t tokens, const BaseWeight& weight) {
  return products.backend == Backend::kCpu && gemm::sums_products(products.weight) &&
         std::min({tokens, weight.rows(), weight.columns()}) >= kFewTokensToSum;
}

// Appends the term scaling * low up to a sum with products in the dtype products.weight. Returns false and
// appends nothing if the term cannot be part of that sum. Operands of bf16 products are split into two bf16
// numbers, and the product of the two smaller ones is left out. The error of the term is then about 2^-16.
bool add_low_rank(std::vector<gemm::Term>& terms, const Tensor& low, const Tensor& up, double scaling,
                  const gemm::Products& products) {
  if (!low.defined() || low.size(1) == 0) return true;
  if (products.weight != at::kBFloat16) {
    terms.push_back({scaling == 1 ? low : low.mul(scaling), up});
    return true;
  }
  const auto left = gemm::split(low, scaling, {0, 1, 0}, 1), right = gemm::split(up, 1, {0, 0, 1}, 0);
  if (!left.has_value() || !right.has_value()) return false;
  terms.push_back({*left, *right});
  return true;
}

Tensor as_float(const Tensor& t) { return t.defined() ? t.to(at::kFloat).contiguous() : t; }

}  // namespace

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
  if (sums(products, tokens, weight)) {
    std::vector<gemm::Term> terms;
    if (add_low_rank(terms, low, low.defined() ? up.t() : up, scaling, products)) {
      terms.push_back({x, weight.factor(/*transposed=*/true)});
      gemm::gemm_sum(products.weight, out, terms, as_float(gain), as_float(bias));
      return out;
    }
  }
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
                    at::TensorOptions like, at::ScalarType dtype, const Tensor& low, const Tensor& down,
                    const gemm::Products& products) {
  const auto summed = [&](const GradAndWeight& term) { return sums(products, tokens, term.weight); };
  std::vector<gemm::Term> summands;
  if (!terms.empty() && std::all_of(terms.begin(), terms.end(), summed) &&
      add_low_rank(summands, low, down, 1, products)) {
    std::deque<ScaledMatrix> scaled;  // its elements do not move when it grows
    for (const auto& [grad, gain, weight] : terms) {
      summands.push_back({gain.defined()
                              ? gemm::Factor(scaled.emplace_back(grad, as_float(gain)), /*transposed=*/false)
                              : gemm::Factor(grad),
                          weight.factor(false)});
    }
    Tensor sum = in_huge_pages(at::empty({tokens, columns}, like.dtype(dtype)));
    gemm::gemm_sum(products.weight, sum, summands);
    return sum;
  }
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
  return (first ? out.zero_() : out).to(dtype);
}

}  // namespace shoestring::quantization
