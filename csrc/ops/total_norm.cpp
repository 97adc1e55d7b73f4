#include "ops/total_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "kernels/total_norm.h"
#include "ops/call.h"

namespace shoestring {
namespace {

using at::Tensor;
using kernels::kNormChunk;

void check(at::TensorList grads) {
  TORCH_CHECK(!grads.empty(), "total_norm: grads: expected at least one tensor, received none");
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto type = grads[i].scalar_type();
    const bool is_float = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
    TORCH_CHECK(is_float && grads[i].layout() == at::kStrided, "total_norm: grads[", i,
                "]: expected a dense fp32, bf16 or fp16 tensor, received ", type, ", ", grads[i].layout());
    TORCH_CHECK(grads[i].device() == grads[0].device(), "total_norm: grads[", i, "]: expected the first one's device, ",
                grads[0].device(), ", received ", grads[i].device());
  }
}

auto squares_of(const Tensor& x) {
  const auto& kernels = cpu::total_norm();
  const auto type = x.scalar_type();
  return type == at::kFloat ? kernels.squares_float : type == at::kBFloat16 ? kernels.squares_bf16 : kernels.squares_fp16;
}

// All tensors are one row of chunks, whose sums are added in order.
Tensor norm_cpu(at::TensorList grads) {
  check(grads);
  std::vector<Tensor> x;
  std::vector<int64_t> ends;  // in chunks
  for (const Tensor& g : grads) {
    x.push_back(g.is_non_overlapping_and_dense() ? g : g.contiguous());  // the order of elements is of no account
    ends.push_back((ends.empty() ? 0 : ends.back()) + (g.numel() + kNormChunk - 1) / kNormChunk);
  }
  std::vector<double> sums(static_cast<size_t>(ends.back()));
  constexpr int64_t kGrain = 8;  // chunks: some microseconds, what it takes to wake a thread
  at::parallel_for(0, ends.back(), kGrain, [&](int64_t first, int64_t last) {
    size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), first) - ends.begin());
    for (int64_t chunk = first; chunk < last; ++chunk) {
      while (chunk >= ends[i]) ++i;
      const int64_t begin = (chunk - (i == 0 ? 0 : ends[i - 1])) * kNormChunk;
      const auto* data = static_cast<const char*>(x[i].const_data_ptr()) + begin * x[i].element_size();
      sums[static_cast<size_t>(chunk)] = squares_of(x[i])(data, std::min(kNormChunk, x[i].numel() - begin));
    }
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return at::full({}, std::sqrt(total), grads[0].options().dtype(at::kFloat));
}

// PyTorch's multi-tensor norm reads 16 bits at the memory's rate there (on the CPU, an element at a time). It takes one
// type at a time.
Tensor norm_cuda(at::TensorList grads) {
  check(grads);
  std::vector<Tensor> norms;
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    std::vector<Tensor> same;
    std::copy_if(grads.begin(), grads.end(), std::back_inserter(same),
                 [type](const Tensor& g) { return g.scalar_type() == type; });
    if (same.empty()) continue;
    // With its own type, the norm of finite fp16 gradients under a loss scale would overflow.
    const auto each = at::_foreach_norm(same, 2, at::kFloat);
    norms.insert(norms.end(), each.begin(), each.end());
  }
  return at::linalg_vector_norm(at::stack(norms));
}

Tensor norm_meta(at::TensorList grads) {
  check(grads);
  return at::empty({}, grads[0].options().dtype(at::kFloat));
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl("total_norm", norm_cpu); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl("total_norm", norm_cuda); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl("total_norm", norm_meta); }
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("total_norm", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

Tensor total_norm(at::TensorList grads) {
  TORCH_CHECK(!grads.empty(), "total_norm: grads: expected at least one tensor, received none");
  static const auto op = find<decltype(norm_cpu)>("shoestring::total_norm");
  return op.call(grads);
}

}  // namespace shoestring
