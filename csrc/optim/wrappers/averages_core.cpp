#include "optim/wrappers/averages_core.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/TensorOptions.h>

#include "core/huge_pages.h"
#include "core/tensors.h"
#include "optim/inner.h"
#include "optim/optimizer.h"

namespace shoestring::optim::detail {
namespace {

void check_averages_options(const AveragesOptions& o) {
  const auto& kind = o.kind();
  expect_value(kind == "ema" || kind == "swa" || kind == "lawa", "kind", "ema, swa or lawa", kind);
  expect_value(kFraction.holds(o.decay()), "decay", c10::str("a number ", kFraction.expected), o.decay());
  expect_value(o.every() >= 1, "every", "a number of at least 1", o.every());
  expect_value(o.last() >= 1, "last", "a number of at least 1", o.last());
  expect_value(o.format() == "fp32" || o.format() == "bf16", "format", "fp32 or bf16", o.format());
  expect_value(o.offload().empty() || o.offload() == "cpu", "offload", "cpu or none", o.offload());
}

std::string describe(at::ScalarType dtype, at::IntArrayRef sizes, at::Device device) {
  return c10::str(dtype, " ", sizes, " on ", device);
}

/// Returns whether the operator _apply_ has kernels for a device.
bool has_kernels(at::Device device) {
  static const auto apply = c10::Dispatcher::singleton().findSchemaOrThrow("shoestring::_apply_", "");
  return !device.is_meta() &&
         apply.hasKernelForDispatchKey(c10::computeDispatchKey(std::nullopt, std::nullopt, device));
}

bool steps_in_one_pass(const Tensor& average) {
  return has_kernels(average.device()) && average.scalar_type() != at::kDouble;
}

/// Returns views of both tensors in the order of memory, so that operators see contiguous tensors, for
/// example of weights in channels_last format.
std::pair<Tensor, Tensor> in_memory_order(const Tensor& a, const Tensor& b) {
  if (a.is_contiguous() || a.strides() != b.strides() || !a.is_non_overlapping_and_dense()) return {a, b};
  const std::vector<int64_t> size{a.numel()}, stride{1};
  return {a.as_strided(size, stride), b.as_strided(size, stride)};
}

/// Computes average += amount * (weight - average). The operator _apply_ does it in one pass over all tensors
/// of a device, with stochastic rounding of bf16 averages.
void move_averages(const std::vector<Tensor>& averages, const std::vector<Tensor>& weights, double amount,
                   const std::vector<int64_t>& numbers, int64_t updates, int64_t seed) {
  // 1 - kept is exact in fp32 for kept >= 0.5. The kernel's two factors then add up to 1, so the average of a
  // constant weight stays there.
  const auto retained = static_cast<double>(static_cast<float>(1 - amount));
  const auto options = ops::ApplyOptions(1 - retained).weight_decay(1);
  std::map<std::string, ops::Arguments> calls;
  for (size_t i = 0; i < averages.size(); ++i) {
    const auto [average, weight] = in_memory_order(averages[i], weights[i]);
    if (!steps_in_one_pass(average)) {
      Tensor moved = average;
      moved.lerp_(weight.to(average.scalar_type()), amount);
      continue;
    }
    ops::Arguments& call = calls.try_emplace(average.device().str(), options).first->second;
    call.params.push_back(average);
    call.grads.emplace_back(weight);
    call.numbers.push_back(numbers[i]);
  }
  for (auto& [device, call] : calls) {
    // Random bits depend on the step counters, so a resumed run draws the bits of a run without interruption.
    call.step = at::full({std::ssize(call.params)}, static_cast<double>(updates),
                         call.params[0].options().dtype(at::kFloat));
    call.maximize = true;
    call.stochastic_rounding = true;
    call.seed = seed;
    call.call();
  }
}

}  // namespace

AveragesCore::AveragesCore(std::vector<std::string> names, const std::vector<Tensor>& tensors,
                           const std::vector<bool>& trained, size_t parameters, AveragesOptions options)
    : options_(std::move(options)) {
  check_averages_options(options_);
  std::unordered_map<c10::TensorImpl*, size_t> known;
  for (size_t i = 0; i < names.size(); ++i) {
    const Tensor& tensor = tensors[i];
    const auto [found, is_new] = known.try_emplace(tensor.unsafeGetTensorImpl(), entries_.size());
    if (is_new) {
      const bool averages = is_supported_float(tensor.scalar_type());
      const bool is_frozen = i < parameters && !(trained[i] && averages);
      add(names[i], tensor, is_frozen ? Role::kFrozen : averages ? Role::kAveraged : Role::kCopied);
    }
    given_.push_back(found->second);
    indices_[names[i]] = found->second;
  }
  // Random bits depend on the place of a tensor's name among the sorted names, because programs may register
  // tensors in different orders.
  std::map<std::string, size_t> sorted;
  for (size_t k = 0; k < averaged_.size(); ++k) sorted[entries_[averaged_[k]].name] = k;
  numbers_.resize(averaged_.size());
  int64_t number = 0;
  for (const auto& [name, k] : sorted) numbers_[k] = number++;
  expect_value(averaged_.size() < size_t{1} << kernels::kNumberBits, "model",
               c10::str("at most ", (1 << kernels::kNumberBits) - 1, " tensors to average"),
               averaged_.size());
}

void AveragesCore::add(const std::string& name, const Tensor& tensor, Role role) {
  expect_value(tensor.layout() == at::kStrided, name, "a dense tensor", tensor.layout());
  const at::Device device = tensor.device();
  if (role == Role::kAveraged && options_.format() == "bf16" && options_.offload().empty()) {
    expect_value(has_kernels(device), name, "CPU or CUDA for the format bf16. Use offload=\"cpu\"", device);
  }
  if (role == Role::kAveraged) averaged_.push_back(entries_.size());
  if (role == Role::kCopied) copied_.push_back(entries_.size());
  if (role == Role::kAveraged && !options_.offload().empty() && !device.is_cpu() && host_ == nullptr) {
    host_ = std::make_unique<Host>(device);
  }
  entries_.push_back({name, tensor, role, tensor.scalar_type(), device, tensor.sizes().vec()});
}

/// Raises unless a tensor can take the place of the entry's tensor.
void AveragesCore::expect_fit(const Entry& entry, const Tensor& tensor) {
  if (entry.role == Role::kFrozen) return;
  if (tensor.scalar_type() == entry.dtype && tensor.device() == entry.device &&
      tensor.sizes() == entry.sizes) {
    return;
  }
  expect_value(false, entry.name,
               describe(entry.dtype, entry.sizes, entry.device) + ", as when the averages were created",
               describe(tensor.scalar_type(), tensor.sizes(), tensor.device()));
}

void AveragesCore::use(const std::vector<Tensor>& tensors, const std::vector<bool>& trained) {
  TORCH_INTERNAL_ASSERT(tensors.size() == given_.size() && trained.size() == given_.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Entry& entry = entries_[given_[i]];
    expect_fit(entry, tensors[i]);
    if (entry.role == Role::kFrozen && trained[i]) {
      expect_value(
          false, entry.name, "a frozen parameter, as when the averages were created",
          "one that requires a gradient. Create Averages while all parameters to average are trainable");
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) entries_[given_[i]].tensor = tensors[i];
}

void AveragesCore::expect_training(const char* what) const {
  TORCH_CHECK(!swapped_, "Averages: ", what, ": expected the training weights in the model, received the ",
              "averages of swap(). Restore the weights first.");
}

at::ScalarType AveragesCore::dtype_of(const Entry& entry) const {
  if (entry.dtype == at::kDouble) return at::kDouble;
  if (options_.format() == "bf16") return at::kBFloat16;
  return options_.kind() == "lawa" ? entry.dtype : at::kFloat;
}

/// Returns the strides of a weight, or those of a contiguous tensor if the weight is not dense. Averages have
/// the same strides, so that operators can read both in the order of memory.
std::vector<int64_t> AveragesCore::strides_of(const Entry& entry) {
  if (entry.tensor.is_non_overlapping_and_dense()) return entry.tensor.strides().vec();
  const auto strides = c10::contiguous_strides(entry.sizes);
  return {strides.begin(), strides.end()};
}

/// Returns uninitialised averages.
AveragesCore::Values AveragesCore::fresh() const {
  Values values;
  for (const size_t i : averaged_) {
    const Entry& entry = entries_[i];
    const auto options =
        at::TensorOptions(dtype_of(entry)).device(host_ != nullptr ? at::Device(at::kCPU) : entry.device);
    values.push_back(in_huge_pages(at::empty_strided(entry.sizes, strides_of(entry), options)));
  }
  return values;
}

AveragesCore::Values AveragesCore::weights() const {
  Values result;
  for (const size_t i : averaged_) result.push_back(entries_[i].tensor.detach());
  return result;
}

void AveragesCore::update() {
  expect_training("update");
  if (!is_due()) {
    ++steps_;
    return;
  }
  const at::NoGradGuard no_grad;
  finish();
  host_ != nullptr ? update_on_host() : update_values(weights(), target(), updates_);
  const bool begins = copies_.empty();
  for (size_t k = 0; k < copied_.size(); ++k) {
    const Tensor& buffer = entries_[copied_[k]].tensor;
    if (begins) {
      copies_.push_back(buffer.detach().clone());
    } else {
      copies_[k].copy_(buffer);
    }
  }
  ++steps_;
  ++updates_;
}

/// Returns the averages to move, or else memory for a copy of the weights.
AveragesCore::Values AveragesCore::target() const {
  if (options_.kind() != "lawa") return values_.empty() ? fresh() : values_.back();
  // When the ring is full, the newest snapshot takes the memory of the oldest one.
  return std::ssize(values_) == options_.last() ? values_.front() : fresh();
}

/// Updates the averages with weights on their device. `target` and `updates` are those from before the
/// update.
void AveragesCore::update_values(const Values& weights, const Values& target, int64_t updates) {
  const bool is_ring = options_.kind() == "lawa";
  if (!values_.empty() && !is_ring) {
    const double amount =
        options_.kind() == "ema" ? 1 - options_.decay() : 1.0 / static_cast<double>(updates + 1);
    return move_averages(target, weights, amount, numbers_, updates, options_.seed());
  }
  for (size_t k = 0; k < target.size(); ++k) target[k].copy_(weights[k]);
  if (std::ssize(values_) == options_.last()) values_.pop_front();
  values_.push_back(target);
}

/// Copies the weights to pinned memory in the current stream, and updates the averages on a thread.
void AveragesCore::update_on_host() {
  const Values weights = this->weights();
  if (host_->weights.empty()) host_->allocate(weights);
  std::vector<at::Device> devices;
  for (size_t k = 0; k < weights.size(); ++k) {
    host_->weights[k].copy_(weights[k], /*non_blocking=*/true);
    const at::Device device = weights[k].device();
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
  }
  std::vector<offload::FencePtr> copied;
  for (const at::Device device : devices) copied.push_back(offload::Fence::now(device));
  host_->done = host_->lane.run({}, [this, copied = std::move(copied), to = target(), updates = updates_] {
    const at::NoGradGuard no_grad;
    for (const auto& fence : copied) fence->synchronize();
    update_values(host_->weights, to, updates);
  });
}

/// Allocates all weights in one piece of memory.
void AveragesCore::Host::allocate(const Values& like) {
  constexpr int64_t kLine = 64;
  const auto padded = [](const Tensor& t) {
    return (static_cast<int64_t>(t.nbytes()) + kLine - 1) / kLine * kLine;
  };
  int64_t bytes = 0;
  for (const Tensor& t : like) bytes += padded(t);
  const Tensor all = memory.empty({bytes}, at::kByte);
  int64_t begin = 0;
  for (const Tensor& t : like) {
    const Tensor flat = all.narrow(0, begin, static_cast<int64_t>(t.nbytes())).view(t.scalar_type());
    weights.push_back(t.is_non_overlapping_and_dense() ? flat.as_strided(t.sizes(), t.strides())
                                                       : flat.view(t.sizes()));
    begin += padded(t);
  }
}

/// Waits for the thread that averages on the CPU. Rethrows its error.
void AveragesCore::finish() const {
  if (host_ == nullptr || host_->done == nullptr) return;
  const auto done = std::exchange(host_->done, nullptr);
  done->synchronize();
}

/// Returns the average of entry averaged_[i], in the dtype in which averages are computed or stored.
Tensor AveragesCore::value(size_t i) const {
  if (options_.kind() != "lawa") return values_.back()[i];
  Tensor sum = values_[0][i].to(compute_type(values_[0][i]), /*non_blocking=*/false, /*copy=*/true);
  for (size_t k = 1; k < values_.size(); ++k) sum.add_(values_[k][i]);
  return sum.div_(static_cast<double>(values_.size()));
}

void AveragesCore::swap_in() {
  expect_training("swap");
  const at::NoGradGuard no_grad;
  finish();
  Values training;
  if (updates_ > 0) {
    for (const auto* list : {&averaged_, &copied_}) {
      for (const size_t i : *list) {
        const Tensor& t = entries_[i].tensor;
        training.push_back(host_ != nullptr ? t.detach().to(at::kCPU, t.scalar_type(), false, /*copy=*/true)
                                            : t.detach().clone());
      }
    }
  }
  swapped_ = true;
  training_ = std::move(training);
  if (updates_ == 0) return;
  try {
    for (size_t k = 0; k < averaged_.size(); ++k) entries_[averaged_[k]].tensor.detach().copy_(value(k));
    for (size_t k = 0; k < copied_.size(); ++k) entries_[copied_[k]].tensor.detach().copy_(copies_[k]);
  } catch (...) {
    swap_out();
    throw;
  }
}

void AveragesCore::swap_out() {
  TORCH_CHECK(swapped_, "Averages: swap: expected the averages in the model, received the training weights");
  const at::NoGradGuard no_grad;
  for (const Entry& entry : entries_) expect_fit(entry, entry.tensor);
  const Values training = std::exchange(training_, {});
  swapped_ = false;
  if (training.empty()) return;
  for (size_t k = 0; k < training.size(); ++k) {
    const size_t i = k < averaged_.size() ? averaged_[k] : copied_[k - averaged_.size()];
    entries_[i].tensor.detach().copy_(training[k]);
  }
}

void AveragesCore::copy_to(const std::vector<std::string>& names, const std::vector<Tensor>& tensors) const {
  const at::NoGradGuard no_grad;
  finish();
  std::vector<bool> has(entries_.size());
  std::vector<std::pair<size_t, Tensor>> targets;
  for (size_t k = 0; k < names.size(); ++k) {
    const auto index = indices_.find(names[k]);
    if (index == indices_.end() || entries_[index->second].role == Role::kFrozen) continue;
    const Entry& entry = entries_[index->second];
    expect_value(tensors[k].sizes() == entry.sizes, "copy_to: " + names[k],
                 c10::str("shape ", at::IntArrayRef(entry.sizes)), tensors[k].sizes());
    has[index->second] = true;
    targets.emplace_back(index->second, tensors[k].detach());
  }
  for (const auto* list : {&averaged_, &copied_}) {
    for (const size_t i : *list)
      expect_value(has[i], "copy_to: model", "a tensor " + entries_[i].name, "none");
  }
  std::map<size_t, size_t> places;  // index in averaged_ or copied_ of each entry
  for (const auto* list : {&averaged_, &copied_}) {
    for (size_t k = 0; k < list->size(); ++k) places[(*list)[k]] = k;
  }
  for (auto& [i, target] : targets) {
    const Entry& entry = entries_[i];
    target.copy_(updates_ == 0                   ? entry.tensor.detach()
                 : entry.role == Role::kAveraged ? value(places[i])
                                                 : copies_[places[i]]);
  }
}

}  // namespace shoestring::optim::detail
