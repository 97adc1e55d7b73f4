#include <shoestring/optim/unfreezing.h>

#include <algorithm>
#include <limits>

#include <ATen/Functions.h>

#include "core/name_patterns.h"
#include "optim/core/state_numbers.h"

namespace shoestring::optim {

Unfreezing::Unfreezing(const torch::nn::Module& module, std::map<std::string, int64_t> schedule) {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  const auto parameters = module.named_parameters();
  const std::vector<std::string> names = parameters.keys();
  std::vector<int64_t> first(names.size(), kNever);
  for (const auto& [pattern, step] : schedule) {
    TORCH_CHECK_VALUE(step >= 0, "Unfreezing: schedule: expected steps of at least 0, received ", step,
                      " for \"", pattern, "\"");
    for (const size_t i : matching("Unfreezing", "schedule", pattern, names)) {
      first[i] = std::min(first[i], step);
    }
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (first[i] != kNever) entries_.push_back({names[i], parameters[names[i]], first[i]});
  }
  step(0);
}

std::vector<std::string> Unfreezing::trained(int64_t step) const {
  std::vector<std::string> names;
  for (const Entry& entry : entries_) {
    if (entry.first <= step) names.push_back(entry.name);
  }
  return names;
}

void Unfreezing::step(int64_t step) {
  TORCH_CHECK_VALUE(step >= 0, "Unfreezing: step: expected a number of at least 0, received ", step);
  step_ = step;
  for (Entry& entry : entries_) {
    const bool is_trained = entry.first <= step;
    if (entry.parameter.requires_grad() != is_trained) entry.parameter.requires_grad_(is_trained);
    if (!is_trained) entry.parameter.mutable_grad().reset();
  }
}

TensorDict Unfreezing::state() const {
  TensorDict state;
  state.insert("step", at::scalar_tensor(step_, at::kLong));
  return state;
}

void Unfreezing::load_state(const TensorDict& state) {
  step(static_cast<int64_t>(detail::number_of("Unfreezing", state, "step")));
}

}  // namespace shoestring::optim
