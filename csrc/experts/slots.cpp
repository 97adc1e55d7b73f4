#include "experts/slots.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace shoestring::experts {

at::Tensor sum_by_expert(const at::Tensor& matrix, c10::ArrayRef<int64_t> offsets,
                         c10::ArrayRef<int64_t> rows, const at::Tensor& scale) {
  const auto experts = static_cast<int64_t>(offsets.size()) - 1;
  const auto type = compute_type(matrix);
  const at::Tensor sums = at::empty({experts, matrix.size(1)}, matrix.options().dtype(type));
  at::parallel_for(0, experts, 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below;  // threads do not inherit that of the operator
    for (int64_t e = begin; e < end; ++e) {
      const int64_t first = offsets[e], count = offsets[e + 1] - first;
      at::Tensor part = rows.empty()
                            ? matrix.narrow(0, first, count)
                            : matrix.index_select(0, at::tensor(rows.slice(first, count), at::kLong));
      if (scale.defined()) part = part.to(type).mul_(scale.narrow(0, first, count).unsqueeze(1));
      at::Tensor row = sums[e];
      at::sum_out(row, part, {0}, /*keepdim=*/false, type);
    }
  });
  return sums;
}

}  // namespace shoestring::experts
