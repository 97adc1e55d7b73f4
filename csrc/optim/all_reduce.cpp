#include "optim/all_reduce.h"

#include <ATen/Functions.h>

#include "core/call.h"

namespace shoestring::optim::detail {

using at::Tensor;

Tensor all_reduce(const Tensor& tensor, const std::string& how, const std::string& group) {
  static const auto reduce =
      find<Tensor(const Tensor&, std::string, std::string)>("_c10d_functional::all_reduce");
  static const auto wait = find<Tensor(const Tensor&)>("_c10d_functional::wait_tensor");
  return wait.call(reduce.call(tensor, how, group));
}

Tensor all_to_all(const Tensor& tensor, const std::vector<int64_t>& received,
                  const std::vector<int64_t>& sent, const std::string& group) {
  static const auto send = find<Tensor(const Tensor&, c10::SymIntArrayRef, c10::SymIntArrayRef, std::string)>(
      "_c10d_functional::all_to_all_single");
  static const auto wait = find<Tensor(const Tensor&)>("_c10d_functional::wait_tensor");
  const std::vector<c10::SymInt> to(sent.begin(), sent.end()), from(received.begin(), received.end());
  return wait.call(send.call(tensor, from, to, group));
}

void combine(const std::vector<Partial>& parts, const SplitParameter& split) {
  std::vector<Tensor> flat;
  for (const Partial& part : parts) {
    for (const Tensor& sum : part.sums) flat.push_back(sum.reshape({-1}));
    for (const Tensor& norm : part.norms) flat.push_back(norm.square().reshape({-1}));
  }
  if (flat.empty()) return;
  Tensor all = at::cat(flat).to(split.device);
  for (const std::string& group : split.groups) all = all_reduce(all, "sum", group);
  all = all.to(flat[0].device());
  int64_t begin = 0;
  const auto next = [&](const Tensor& like) {
    const Tensor found = all.narrow(0, begin, like.numel()).view(like.sizes());
    begin += like.numel();
    return found;
  };
  for (const Partial& part : parts) {
    for (const Tensor& sum : part.sums) sum.copy_(next(sum));
    for (const Tensor& norm : part.norms) norm.copy_(next(norm).sqrt());
  }
}

}  // namespace shoestring::optim::detail
