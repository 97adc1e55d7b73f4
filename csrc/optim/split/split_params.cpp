#include "optim/split/split_params.h"

#include <mutex>
#include <unordered_map>
#include <utility>

#include <c10/util/accumulate.h>

namespace shoestring::optim {
namespace {

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Values that belong to tensors, as long as the tensors exist.
template <class Value>
class Known {
 public:
  void set(const at::Tensor& tensor, Value value) {
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const auto& entry) { return entry.second.first.expired(); });
    all_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                          std::pair(Weak(tensor.getIntrusivePtr()), std::move(value)));
  }
  const Value* find(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto entry = all_.find(tensor.unsafeGetTensorImpl());
    return entry != all_.end() && !entry->second.first.expired() ? &entry->second.second : nullptr;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<c10::TensorImpl*, std::pair<Weak, Value>> all_;
};

// Tensors may outlive static objects.
Known<SplitParameter>& splits() {
  static auto* const all = new Known<SplitParameter>;
  return *all;
}
// The part of a parameter, and whether the parameter has no memory.
struct KnownPart {
  Weak tensor;
  bool is_alone;
};
Known<KnownPart>& parts() {
  static auto* const all = new Known<KnownPart>;
  return *all;
}

}  // namespace

int64_t SplitParameter::numel() const { return c10::multiply_integers(sizes); }

void set_split(const at::Tensor& part, SplitParameter of) { splits().set(part, std::move(of)); }

void set_splits(const std::vector<at::Tensor>& parts, const std::vector<std::vector<std::string>>& groups,
                const std::vector<int64_t>& pieces, const std::vector<std::vector<int64_t>>& sizes,
                const std::vector<std::vector<int64_t>>& begins, at::DeviceType device) {
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].empty()) continue;
    set_split(parts[i], {groups[i], pieces[i], sizes[i], begins[i], device});
  }
}

const SplitParameter* split_of(const at::Tensor& tensor) { return splits().find(tensor); }

at::IntArrayRef whole_sizes(const at::Tensor& tensor) {
  const SplitParameter* split = split_of(tensor);
  return split != nullptr ? at::IntArrayRef(split->sizes) : tensor.sizes();
}

void set_part(const at::Tensor& whole, const at::Tensor& part, bool is_alone) {
  parts().set(whole, KnownPart{Weak(part.getIntrusivePtr()), is_alone});
}

at::Tensor part_of(const at::Tensor& whole) {
  const KnownPart* part = parts().find(whole);
  return part != nullptr && part->is_alone ? at::Tensor(part->tensor.lock()) : at::Tensor();
}

bool is_part_of(const at::Tensor& part, const at::Tensor& whole) {
  const KnownPart* known = parts().find(whole);
  return known != nullptr && part.is_same(at::Tensor(known->tensor.lock()));
}

}  // namespace shoestring::optim
