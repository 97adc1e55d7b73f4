// The state of averages, as tensors by name.

#include <algorithm>
#include <iterator>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "optim/wrappers/averages_core.h"

namespace shoestring::optim::detail {
namespace {

constexpr const char* kKinds[] = {"ema", "swa", "lawa"};

int64_t number_of_kind(const std::string& kind) {
  return std::find(std::begin(kKinds), std::end(kKinds), kind) - std::begin(kKinds);
}

const Tensor& find_entry(const TensorDict& state, const std::string& name, const std::string& expected) {
  const Tensor* tensor = state.find(name);
  expect_value(tensor != nullptr && tensor->defined(), "load_state: " + name, expected, "none");
  return *tensor;
}

int64_t read_number(const TensorDict& state, const std::string& name) {
  const Tensor& t = find_entry(state, name, "a number");
  expect_value(t.numel() == 1 && at::isIntegralType(t.scalar_type(), /*includeBool=*/false),
               "load_state: " + name, "one integer", c10::str(t.scalar_type(), " ", t.sizes()));
  const auto number = t.item<int64_t>();
  expect_value(number >= 0, "load_state: " + name, "a number of at least 0", number);
  return number;
}

std::string prefix_of(const std::string& kind, size_t index) {
  return kind == "lawa" ? c10::str("snapshot.", index, ".") : "average.";
}

}  // namespace

TensorDict AveragesCore::state() const {
  finish();
  TensorDict state("tensor");
  for (const auto& [name, number] : {std::pair("kind", number_of_kind(options_.kind())),
                                     std::pair("steps", steps_), std::pair("updates", updates_)}) {
    state.insert(name, at::scalar_tensor(number, at::kLong));
  }
  for (size_t s = 0; s < values_.size(); ++s) {
    for (size_t k = 0; k < averaged_.size(); ++k) {
      state.insert(prefix_of(options_.kind(), s) + entries_[averaged_[k]].name, values_[s][k]);
    }
  }
  for (size_t k = 0; k < copies_.size(); ++k) {
    state.insert("copy." + entries_[copied_[k]].name, copies_[k]);
  }
  return state;
}

void AveragesCore::load_state(const TensorDict& state) {
  expect_training("load_state");
  const at::NoGradGuard no_grad;
  finish();
  const auto kind = read_number(state, "kind"), steps = read_number(state, "steps"),
             updates = read_number(state, "updates");
  expect_value(kind == number_of_kind(options_.kind()), "load_state: kind",
               c10::str(number_of_kind(options_.kind()), " (", options_.kind(), ")"), kind);
  expect_value(updates <= steps, "load_state: updates", c10::str("at most the ", steps, " steps"), updates);

  size_t known = 3;
  const auto collect = [&](const std::string& prefix, const std::vector<size_t>& entries, auto dtype) {
    Values result;
    for (const size_t i : entries) {
      const Entry& entry = entries_[i];
      const auto expected = c10::str(dtype(entry), " ", at::IntArrayRef(entry.sizes));
      const Tensor& tensor = find_entry(state, prefix + entry.name, expected);
      expect_value(tensor.scalar_type() == dtype(entry) && tensor.sizes() == entry.sizes,
                   "load_state: " + prefix + entry.name, expected,
                   c10::str(tensor.scalar_type(), " ", tensor.sizes()));
      result.push_back(tensor);
      ++known;
    }
    return result;
  };
  std::deque<Values> values;
  Values copies;
  if (updates > 0) {
    const bool is_ring = options_.kind() == "lawa";
    const auto has = [&](size_t s) {
      return !averaged_.empty() && state.contains(prefix_of("lawa", s) + entries_[averaged_[0]].name);
    };
    for (size_t s = 0; s == 0 || (is_ring && has(s)); ++s) {
      values.push_back(
          collect(prefix_of(options_.kind(), s), averaged_, [&](const Entry& e) { return dtype_of(e); }));
    }
    copies = collect("copy.", copied_, [](const Entry& e) { return e.dtype; });
  }
  expect_value(known == state.size(), "load_state: state", c10::str(known, " tensors of these weights"),
               state.size());
  expect_value(std::ssize(values) <= updates, "load_state: state",
               c10::str("at most ", updates, " snapshots"), values.size());
  while (std::ssize(values) > options_.last()) values.pop_front();

  // Allocate everything before anything changes.
  std::deque<Values> snapshots;
  for (const Values& from : values) {
    const Values& to = snapshots.emplace_back(fresh());
    for (size_t k = 0; k < to.size(); ++k) to[k].copy_(from[k]);
  }
  Values own_copies;
  for (size_t k = 0; k < copies.size(); ++k) {
    own_copies.push_back(at::empty_like(entries_[copied_[k]].tensor));
    own_copies.back().copy_(copies[k]);
  }
  values_ = std::move(snapshots);
  copies_ = std::move(own_copies);
  steps_ = steps;
  updates_ = updates;
}

}  // namespace shoestring::optim::detail
