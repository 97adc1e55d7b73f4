// An operator that reads a weight that is away as losses on a GPU do: a product with each panel, while the
// next panel arrives. The losses themselves run on the CPU here.

#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/row_source.h"

namespace simdev {
namespace {

// Returns x weight^T, from `step` rows of the weight at a time.
at::Tensor linear_by_panels(const at::Tensor& x, const at::Tensor& weight, int64_t step) {
  const auto source = shoestring::row_source_of(weight);
  TORCH_CHECK(source != nullptr, "linear_by_panels: expected a weight that is away");
  const at::Tensor out = at::empty({x.size(0), weight.size(0)}, x.options());
  source->for_each(weight, step, [&](int64_t first, const at::Tensor& rows) {
    out.narrow(1, first, rows.size(0)).copy_(at::mm(x, rows.t()));
  });
  return out;
}

TORCH_LIBRARY(simdev_panels, m) { m.def("linear(Tensor x, Tensor weight, int step) -> Tensor"); }
TORCH_LIBRARY_IMPL(simdev_panels, PrivateUse1, m) { m.impl("linear", linear_by_panels); }

}  // namespace
}  // namespace simdev
