#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <shoestring/distributed/distributed.h>

#include "distributed/compressor.h"

namespace shoestring::distributed::detail {

/// Returns the buckets in which weights are averaged, each as the indices of parameters of one device. A
/// bucket is complete with `bucket_elements` elements or more.
std::vector<std::vector<int64_t>> averaged_buckets(const std::vector<at::Tensor>& params,
                                                   int64_t bucket_elements);

/// Averages weights for DiLoCo and LocalSGD of both languages. See DiLoCo. Thread-safe: a method waits while
/// another thread is in one, and so for the collectives of that thread.
class Averaging {
 public:
  /// `name` begins errors.
  Averaging(std::string name, std::vector<at::Tensor> parameters, GroupPtr group,
            const DiLoCoOptions& options);

  /// Replaces the tensors. Local parts of DTensors may be other tensors in each step.
  void use(std::vector<at::Tensor> parameters);
  bool step();
  void average();
  void regroup(GroupPtr group);
  int64_t steps() const;
  TensorDict state();
  void load_state(const TensorDict& state);
  int64_t sent_bytes() const;
  int64_t residual_bytes() const;

 private:
  /// Parameters that are sent together.
  struct Bucket {
    std::vector<size_t> params;
    at::Tensor anchor;    // the averaged weights, fp32, one parameter after the other
    at::Tensor momentum;  // momentum of the outer steps
    at::Tensor mean;      // the difference from the anchor while it is under way, then its mean
    c10::intrusive_ptr<c10d::Work> work;
    Compressor::FuturePtr future;
  };
  /// Parameters that are averaged at the same time.
  struct Fragment {
    int64_t due = 0;  // the step of each period, modulo `every`
    std::vector<Bucket> buckets;
    std::unique_ptr<Compressor> compressor;
    int64_t averages = -1;  // that were applied; -1 without an anchor
    int64_t begun = -1;     // the step at which the average under way began, or -1
    bool is_second = false, is_received = false;
  };

  [[nodiscard]] std::unique_lock<std::recursive_mutex> lock() const { return std::unique_lock(mutex_); }
  void deal_out(int64_t bucket_elements);
  void begin(Fragment& fragment);
  void send_means(Fragment& fragment);
  void receive(Fragment& fragment);
  void finish(Fragment& fragment, double alpha);
  void give(const Bucket& bucket, double alpha);
  at::Tensor flat(const Bucket& bucket) const;
  void abandon();
  void share();
  void receive_state(const at::Tensor& all, int64_t source);
  at::Tensor of_all_ranks(const std::vector<double>& numbers) const;
  void check_failure() const;

  const std::string name_;
  const DiLoCoOptions options_;
  const int64_t bits_;
  const double alpha_;
  std::vector<at::Tensor> params_;
  GroupPtr group_;
  std::vector<Fragment> fragments_;
  int64_t steps_ = 0, sent_ = 0;
  mutable std::recursive_mutex mutex_;
};

}  // namespace shoestring::distributed::detail
