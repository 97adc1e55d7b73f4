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

void set_splits(const std::vector<at::Tensor>& parts, const std::vector<std::vector<std::string>>& groups,
                const std::vector<int64_t>& pieces, const std::vector<std::vector<int64_t>>& sizes,
                const std::vector<std::vector<int64_t>>& begins, at::DeviceType device) {
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].empty() && pieces[i] == 0) continue;
    set_split(parts[i], {groups[i], pieces[i], sizes[i], begins[i], device});
  }
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
