#pragma once

// The implementation of Averages, for both languages.

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <shoestring/optim/averages.h>

#include "offload/copy_lane.h"
#include "offload/host_memory.h"

namespace shoestring::optim::detail {

using at::Tensor;

template <class Received>
void expect_value(bool good, const std::string& argument, const std::string& expected,
                  const Received& received) {
  TORCH_CHECK_VALUE(good, "Averages: ", argument, ": expected ", expected, ", received ", received);
}

class AveragesCore {
 public:
  /// The first `parameters` tensors are parameters, the others are buffers. `trained` says for each tensor
  /// whether it requires a gradient; it has no effect for buffers. A tensor may occur under several names.
  AveragesCore(std::vector<std::string> names, const std::vector<Tensor>& tensors,
               const std::vector<bool>& trained, size_t parameters, AveragesOptions options);

  /// Keeps other threads from using the averages while the result lives. Callers hold it around other calls.
  [[nodiscard]] std::unique_lock<std::mutex> lock() const { return std::unique_lock(mutex_); }

  /// Replaces the tensors of the model, which may be new objects. Raises, and changes nothing, if one has
  /// another dtype, device or shape, or if a frozen parameter is trained now.
  void use(const std::vector<Tensor>& tensors, const std::vector<bool>& trained);

  /// Returns whether the next update() updates the averages, or only counts a step.
  bool is_due() const { return (steps_ + 1) % options_.every() == 0; }
  void update();
  void swap_in();
  void swap_out();
  void copy_to(const std::vector<std::string>& names, const std::vector<Tensor>& tensors) const;
  int64_t updates() const { return updates_; }
  TensorDict state() const;
  void load_state(const TensorDict& state);

 private:
  enum class Role { kAveraged, kCopied, kFrozen };
  struct Entry {
    std::string name;
    Tensor tensor;
    Role role;
    at::ScalarType dtype;
    at::Device device;
    std::vector<int64_t> sizes;
  };
  using Values = std::vector<Tensor>;

  // Averages on a thread of the CPU, for weights on another device.
  struct Host {
    explicit Host(at::Device device) : memory("Averages", device) {}
    void allocate(const Values& like);

    offload::HostMemory memory;
    Values weights;          // pinned copies of the weights, in their own dtypes
    offload::FencePtr done;  // of the last update
    offload::CopyLane lane{at::kCPU, /*threads=*/0};
  };

  void add(const std::string& name, const Tensor& tensor, Role role);
  void expect_training(const char* what) const;
  static void expect_fit(const Entry& entry, const Tensor& tensor);
  at::ScalarType dtype_of(const Entry& entry) const;
  static std::vector<int64_t> strides_of(const Entry& entry);
  Values fresh() const;
  Values weights() const;
  Values target() const;
  void update_values(const Values& weights, const Values& target, int64_t updates);
  void update_on_host();
  void finish() const;
  Tensor value(size_t i) const;

  mutable std::mutex mutex_;
  AveragesOptions options_;
  std::vector<Entry> entries_;             // distinct tensors
  std::vector<size_t> given_;              // index of the entry of each tensor of the constructor
  std::map<std::string, size_t> indices_;  // index of the entry of each name
  std::vector<size_t> averaged_, copied_;  // indices of the entries with these roles
  std::vector<int64_t> numbers_;           // of the entries in averaged_; they select random bits
  int64_t steps_ = 0, updates_ = 0;
  // The averages; for "lawa" the snapshots, the oldest first. Empty before the first update. Each element has
  // a tensor for each entry in averaged_.
  std::deque<Values> values_;
  Values copies_;  // the copied buffers
  bool swapped_ = false;
  Values training_;  // the training weights of all averaged and then all copied entries, during a swap
  std::unique_ptr<Host> host_;  // declared last: its thread ends before the tensors are freed
};

}  // namespace shoestring::optim::detail
