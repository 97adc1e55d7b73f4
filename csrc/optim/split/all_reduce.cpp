#include "optim/split/all_reduce.h"

#include <ATen/Functions.h>

#include "core/call.h"

namespace shoestring::optim::detail {

using at::Tensor;

namespace {

// Calls an operator and waits for its result. The call is boxed, since PyTorch's releases declare the names
// of groups by different types.
Tensor awaited(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  static const auto wait = find<Tensor(const Tensor&)>("_c10d_functional::wait_tensor");
  op.callBoxed(arguments);
  return wait.call(arguments[0].toTensor());
}

c10::OperatorHandle collective(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

}  // namespace

Tensor all_reduce(const Tensor& tensor, const std::string& how, const std::string& group) {
  static const auto op = collective("_c10d_functional::all_reduce");
  return awaited(op, {tensor, how, group});
}

Tensor all_to_all(const Tensor& tensor, const std::vector<int64_t>& received,
                  const std::vector<int64_t>& sent, const std::string& group) {
  static const auto op = collective("_c10d_functional::all_to_all_single");
  return awaited(op, {tensor, received, sent, group});
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
    const Tensor reduced = all.narrow(0, begin, like.numel()).view(like.sizes());
    begin += like.numel();
    return reduced;
  };
  for (const Partial& part : parts) {
    for (const Tensor& sum : part.sums) sum.copy_(next(sum));
    for (const Tensor& norm : part.norms) norm.copy_(next(norm).sqrt());
  }
}

}  // namespace shoestring::optim::detail
