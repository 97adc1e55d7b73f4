#include "optim/core/split_state.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/ceil_div.h>

#include "optim/split/all_reduce.h"

namespace shoestring::optim::detail {
namespace {

// A tensor without memory that has the shape of the whole parameter.
Tensor like_whole(const SplitParameter& split) {
  return at::empty(split.sizes, at::TensorOptions().device(at::kMeta));
}

}  // namespace

std::optional<SplitTensor> split_of_state(const Rule& rule, const std::string& name, at::IntArrayRef sizes,
                                          const SplitParameter& of) {
  const auto extra = std::find_if(rule.extras.begin(), rule.extras.end(),
                                  [&](const Extra& extra) { return extra.name == name; });
  if (name == "step" || (extra != rule.extras.end() && !extra->is_elementwise)) return std::nullopt;
  if (sizes == of.sizes) return SplitTensor{of, of.begins, of.sizes};
  // Other tensors are flat, and have the same number of elements for each block.
  const int64_t blocks = at::ceil_div(of.numel(), kBlock);
  if (extra != rule.extras.end() || sizes.size() != 1 || blocks == 0 || sizes[0] % blocks != 0)
    return std::nullopt;
  std::vector<int64_t> begins;
  for (const int64_t begin : of.begins) begins.push_back(at::ceil_div(begin, kBlock) * (sizes[0] / blocks));
  return SplitTensor{of, std::move(begins), sizes.vec()};
}

Tensor gathered(const Tensor& part, const SplitTensor& split) {
  const size_t ranks = split.begins.size() - 1;
  const auto size = static_cast<int64_t>(part.element_size());
  std::vector<int64_t> received;  // bytes
  for (size_t rank = 0; rank < ranks; ++rank)
    received.push_back((split.begins[rank + 1] - split.begins[rank]) * size);
  // All ranks get the part of each.
  const Tensor bytes = part.contiguous().view({-1}).narrow(0, 0, split.end() - split.begin()).view(at::kByte);
  const std::vector<int64_t> sent(ranks, bytes.numel());
  const Tensor all = all_to_all(bytes.repeat({static_cast<int64_t>(ranks)}).to(split.of.device), received,
                                sent, split.of.groups[0]);
  return all.to(bytes.device()).view(part.scalar_type()).view(split.sizes);
}

std::map<std::string, std::vector<int64_t>> whole_shapes(const Rule& rule, const Kind& kind,
                                                         const SplitParameter& split) {
  const Tensor like = like_whole(split);
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const Part& of : parts(rule, kind)) shapes[of.name] = of.shape(like);
  for (const Extra& extra : rule.extras) shapes[extra.name] = extra.shape_of(like);
  return shapes;
}

ParamState part_of_state(const Rule& rule, const Kind& kind, const ParamState& whole,
                         const SplitParameter& split) {
  check_state(rule, whole, like_whole(split), kind);
  std::map<std::string, Tensor> tensors = whole.tensors();
  for (auto& [name, tensor] : tensors) {
    if (const auto how = split_of_state(rule, name, tensor.sizes(), split))
      tensor = tensor.contiguous().view({-1}).narrow(0, how->begin(), how->end() - how->begin());
  }
  return ParamState(std::move(tensors));
}

}  // namespace shoestring::optim::detail
