#include "optim/all_reduce.h"

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

}  // namespace shoestring::optim::detail
