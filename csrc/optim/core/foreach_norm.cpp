#include "optim/core/foreach_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "core/call.h"
#include "core/threads.h"
#include "optim/core/foreach_norm_table.h"

namespace shoestring::optim::ops {
namespace {

using at::Tensor;
using kernels::kNormChunk;

void check(at::TensorList tensors) {
  TORCH_CHECK(!tensors.empty(), "foreach_norm: tensors: expected at least one tensor, received none");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto type = tensors[i].scalar_type();
    const bool is_float = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
    TORCH_CHECK(is_float && tensors[i].layout() == at::kStrided, "foreach_norm: tensors[", i,
                "]: expected a dense fp32, bf16 or fp16 tensor, received ", type, ", ", tensors[i].layout());
    TORCH_CHECK(tensors[i].device() == tensors[0].device(), "foreach_norm: tensors[", i,
                "]: expected the first one's device, ", tensors[0].device(), ", received ",
                tensors[i].device());
  }
}

auto squares_of(const Tensor& x) {
  const auto& kernels = cpu::foreach_norm();
  const auto type = x.scalar_type();
  return type == at::kFloat      ? kernels.squares_float
         : type == at::kBFloat16 ? kernels.squares_bf16
                                 : kernels.squares_fp16;
}

// Splits all tensors into one sequence of chunks, which the threads share. The sums of a tensor's chunks are
// added in order, so the number of threads does not affect the norms.
Tensor norm_cpu(at::TensorList tensors) {
  check(tensors);
  std::vector<Tensor> x;
  std::vector<int64_t> ends;  // end of each tensor in the sequence of all chunks, counted in chunks
  for (const Tensor& g : tensors) {
    // The order of elements does not matter for a norm, so a dense tensor with any strides is read directly.
    x.push_back(g.is_non_overlapping_and_dense() ? g : g.contiguous());
    ends.push_back((ends.empty() ? 0 : ends.back()) + (g.numel() + kNormChunk - 1) / kNormChunk);
  }
  std::vector<double> sums(static_cast<size_t>(ends.back()));
  const int64_t grain = row_grain(kNormChunk * static_cast<int64_t>(sizeof(float)));
  at::parallel_for(0, ends.back(), grain, [&](int64_t first, int64_t last) {
    size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), first) - ends.begin());
    for (int64_t chunk = first; chunk < last; ++chunk) {
      while (chunk >= ends[i]) ++i;
      const int64_t begin = (chunk - (i == 0 ? 0 : ends[i - 1])) * kNormChunk;
      const auto* data = static_cast<const char*>(x[i].const_data_ptr()) + begin * x[i].element_size();
      sums[static_cast<size_t>(chunk)] = squares_of(x[i])(data, std::min(kNormChunk, x[i].numel() - begin));
    }
  });
  Tensor norms = at::empty({std::ssize(x)}, tensors[0].options().dtype(at::kFloat));
  int64_t chunk = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    double total = 0;
    for (; chunk < ends[i]; ++chunk) total += sums[static_cast<size_t>(chunk)];
    norms.mutable_data_ptr<float>()[i] = static_cast<float>(std::sqrt(total));
  }
  return norms;
}

// On CUDA, at::_foreach_norm reads 16-bit tensors at full memory bandwidth. (On the CPU it reads one element
// at a time.) It needs one call per dtype.
Tensor norm_cuda(at::TensorList tensors) {
  check(tensors);
  std::vector<Tensor> norms(tensors.size());
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    std::vector<Tensor> same;
    std::vector<size_t> places;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].scalar_type() != type) continue;
      same.push_back(tensors[i]);
      places.push_back(i);
    }
    if (same.empty()) continue;
    // The norms are computed in fp32. In fp16, the norm could overflow although all gradients are finite,
    // since gradients may be multiplied by a loss scale.
    const auto norms_of_same = at::_foreach_norm(same, 2, at::kFloat);
    for (size_t i = 0; i < places.size(); ++i) norms[places[i]] = norms_of_same[i];
  }
  return at::stack(norms);
}

Tensor norm_meta(at::TensorList tensors) {
  check(tensors);
  return at::empty({static_cast<int64_t>(tensors.size())}, tensors[0].options().dtype(at::kFloat));
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl("foreach_norm", norm_cpu); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl("foreach_norm", norm_cuda); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl("foreach_norm", norm_meta); }
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("foreach_norm", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

Tensor foreach_norm(at::TensorList tensors) {
  TORCH_CHECK(!tensors.empty(), "foreach_norm: tensors: expected at least one tensor, received none");
  static const auto op = find<decltype(norm_cpu)>("shoestring::foreach_norm");
  return op.call(tensors);
}

}  // namespace shoestring::optim::ops
