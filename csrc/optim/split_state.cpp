#include "optim/split_state.h"

#include <utility>

#include <ATen/Functions.h>
#include <ATen/ceil_div.h>

#include "optim/all_reduce.h"

namespace shoestring::optim::detail {
namespace {

// Returns where the part of each rank begins in a tensor of the state, and the number of its elements.
std::vector<int64_t> begins_of(const Part& part, const SplitParameter& split) {
  std::vector<int64_t> begins;
  for (const int64_t begin : split.begins)
    begins.push_back(part.shaped ? begin : at::ceil_div(begin, kBlock) * part.per_block);
  return begins;
}

// A tensor without memory that has the shape of the whole parameter.
Tensor like_whole(const SplitParameter& split) {
  return at::empty(split.sizes, at::TensorOptions().device(at::kMeta));
}

// Returns the parts of a tensor that all ranks have, in their order.
Tensor gathered(const Tensor& part, const std::vector<int64_t>& begins, const SplitParameter& split) {
  const size_t ranks = begins.size() - 1;
  const auto size = static_cast<int64_t>(part.element_size());
  std::vector<int64_t> received;  // bytes
  for (size_t rank = 0; rank < ranks; ++rank) received.push_back((begins[rank + 1] - begins[rank]) * size);
  // All ranks get the part of each.
  const Tensor own = part.contiguous().view({-1}).view(at::kByte);
  const std::vector<int64_t> sent(ranks, own.numel());
  const Tensor all =
      all_to_all(own.repeat({static_cast<int64_t>(ranks)}).to(split.device), received, sent, split.groups[0]);
  return all.to(own.device()).view(part.scalar_type());
}

// Returns whether each process has its own elements of an extra tensor.
bool is_split(const Extra& extra, const SplitParameter& split) {
  return extra.is_elementwise && extra.shape_of(like_whole(split)) == split.sizes;
}

}  // namespace

ParamState whole_state(const Rule& rule, const Kind& kind, const ParamState& part,
                       const SplitParameter& split) {
  std::map<std::string, Tensor> tensors{{"step", part["step"]}};
  const Tensor like = like_whole(split);
  for (const Part& of : parts(rule, kind))
    tensors[of.name] = gathered(part[of.name], begins_of(of, split), split).view(of.shape(like));
  for (const Extra& extra : rule.extras) {
    const Tensor& own = part[extra.name];
    tensors[extra.name] = is_split(extra, split) ? gathered(own, split.begins, split).view(split.sizes) : own;
  }
  return ParamState(std::move(tensors));
}

ParamState part_of_state(const Rule& rule, const Kind& kind, const ParamState& whole,
                         const SplitParameter& split) {
  check_state(rule, whole, like_whole(split), kind);
  std::map<std::string, Tensor> tensors{{"step", whole["step"]}};
  const auto own = static_cast<size_t>(split.piece);
  for (const Part& of : parts(rule, kind)) {
    const std::vector<int64_t> begins = begins_of(of, split);
    tensors[of.name] =
        whole[of.name].contiguous().view({-1}).narrow(0, begins[own], begins[own + 1] - begins[own]);
  }
  for (const Extra& extra : rule.extras) {
    const Tensor& tensor = whole[extra.name];
    const int64_t begin = split.begins[own], end = split.begins[own + 1];
    tensors[extra.name] =
        is_split(extra, split) ? tensor.contiguous().view({-1}).narrow(0, begin, end - begin) : tensor;
  }
  return ParamState(std::move(tensors));
}

}  // namespace shoestring::optim::detail
