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

}  // namespace shoestring::optim::detail
