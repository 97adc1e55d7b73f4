#include "optim/split_params.h"

#include <mutex>
#include <unordered_map>
#include <utility>

#include <c10/util/accumulate.h>

namespace shoestring::optim {
namespace {

struct Known {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  SplitParameter of;
};

std::mutex mutex;
std::unordered_map<c10::TensorImpl*, Known>& known() {
  static auto* const all =
      new std::unordered_map<c10::TensorImpl*, Known>;  // tensors may outlive static objects
  return *all;
}

}  // namespace

int64_t SplitParameter::numel() const { return c10::multiply_integers(sizes); }

void set_split(const at::Tensor& part, SplitParameter of) {
  const std::lock_guard lock(mutex);
  std::erase_if(known(), [](const auto& entry) { return entry.second.tensor.expired(); });
  known().insert_or_assign(
      part.unsafeGetTensorImpl(),
      Known{c10::weak_intrusive_ptr<c10::TensorImpl>(part.getIntrusivePtr()), std::move(of)});
}

const SplitParameter* split_of(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex);
  const auto found = known().find(tensor.unsafeGetTensorImpl());
  return found != known().end() && !found->second.tensor.expired() ? &found->second.of : nullptr;
}

at::IntArrayRef whole_sizes(const at::Tensor& tensor) {
  const SplitParameter* split = split_of(tensor);
  return split != nullptr ? at::IntArrayRef(split->sizes) : tensor.sizes();
}

}  // namespace shoestring::optim
