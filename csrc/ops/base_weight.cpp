#include "ops/base_weight.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>

namespace shoestring {

using at::Tensor;

namespace {

// A panel that is still in the last cache when its product reads it, and few enough of them: each is two rounds of all
// threads, which waits where other programs run.
constexpr int64_t kPanelBytes = int64_t{4} << 20;

int64_t panel_rows(int64_t rows, int64_t columns) {
  const int64_t fit = kPanelBytes / (std::max<int64_t>(columns, 1) * static_cast<int64_t>(sizeof(float)));
  return std::max<int64_t>(1, std::min(rows, std::max<int64_t>(64, fit / 16 * 16)));
}

}  // namespace

at::ScalarType product_type(const Tensor& x) {
  if (x.scalar_type() != at::kBFloat16 || cpu::capability() != cpu::Capability::kAvx512) return compute_type(x);
#if defined(__x86_64__)
  static const bool units = __builtin_cpu_supports("avx512bf16");
#else
  constexpr bool units = false;
#endif
  return units && at::globalContext().userEnabledMkldnn() ? at::kBFloat16 : compute_type(x);
}

BaseWeight BaseWeight::dense(const Tensor& weight, at::ScalarType product) {
  BaseWeight base;
  base.rows_ = weight.size(0);
  base.columns_ = weight.size(1);
  base.dense_ = weight;
  const bool widen = weight.scalar_type() != product;
  base.step_ = widen ? panel_rows(base.rows_, base.columns_) : std::max<int64_t>(base.rows_, 1);
  if (widen) base.buffer_ = at::empty({base.step_, base.columns_}, weight.options().dtype(product));
  return base;
}

BaseWeight BaseWeight::quantized(PackedReader reader, int64_t rows, int64_t columns, at::TensorOptions product) {
  BaseWeight base;
  base.rows_ = rows;
  base.columns_ = columns;
  base.step_ = panel_rows(rows, columns);
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

Tensor apply_weight(const BaseWeight& weight, const Tensor& x, const Tensor& bias, const Tensor& low, const Tensor& up,
                    double scaling, at::ScalarType dtype) {
  const int64_t tokens = x.size(0);
  Tensor out = at::empty({tokens, weight.rows()}, x.options().dtype(dtype));
  const bool round = dtype != x.scalar_type();
  const bool native = x.scalar_type() == at::kBFloat16;
  weight.for_each_panel([&](int64_t begin, const Tensor& panel) {
    const int64_t size = panel.size(0);
    Tensor columns = out.narrow(1, begin, size);
    if (native && low.defined()) {  // the low-rank part is fp32
      Tensor sum = at::mm(x, panel.t()).to(at::kFloat);
      if (bias.defined()) sum.add_(bias.narrow(0, begin, size));
      columns.copy_(sum.addmm_(low, up.narrow(0, begin, size).t(), /*beta=*/1, /*alpha=*/scaling));
      return;
    }
    Tensor to = round ? at::empty({tokens, size}, x.options()) : columns;
    if (bias.defined()) {
      at::addmm_out(to, bias.narrow(0, begin, size).to(x.scalar_type()), x, panel.t());
    } else {
      at::mm_out(to, x, panel.t());
    }
    if (low.defined()) to.addmm_(low, up.narrow(0, begin, size).t(), /*beta=*/1, /*alpha=*/scaling);
    if (round) columns.copy_(to);
  });
  return out;
}

Tensor times_weight(const BaseWeight& weight, const Tensor& grad, at::ScalarType compute, at::ScalarType product) {
  Tensor out = at::empty({grad.size(0), weight.columns()}, grad.options().dtype(compute));
  if (weight.rows() == 0) return out.zero_();
  weight.for_each_panel([&](int64_t begin, const Tensor& panel) {
    Tensor part = grad.narrow(1, begin, panel.size(0)).to(product);
    if (product != compute) {
      begin == 0 ? out.copy_(at::mm(part, panel)) : out.add_(at::mm(part, panel));
      return;
    }
    at::addmm_out(out, out, part, panel, /*beta=*/begin == 0 ? 0 : 1, /*alpha=*/1);
  });
  return out;
}

}  // namespace shoestring
