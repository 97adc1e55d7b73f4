#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/failures.h"

namespace shoestring::distributed {

/// Hands every collective to another backend, and names ranks and collectives in the errors. Work::wait() and
/// futures of the collectives raise for example
///
///     rank 0 of 3: collective 12, all_reduce of [64, 8] Float: Connection closed by peer; rank 2 has ended
///     or is stopped
///
/// Ranks that issue different collectives raise after the timeout, and say at which collective each rank is.
/// On Gloo, collectives of different kinds, dtypes or numbers of elements get different tags. They never
/// meet, so none of them computes with the bytes of another one, or ends the process.
class NamedBackend : public c10d::Backend {
 public:
  using BackendPtr = c10::intrusive_ptr<Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using OptionsPtr = c10::intrusive_ptr<Options>;
  using Tensor = at::Tensor;
  using Tensors = std::vector<at::Tensor>;
  using Milliseconds = std::chrono::milliseconds;
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  NamedBackend(BackendPtr backend, std::shared_ptr<Listener> listener, int64_t number = 0);

  const int64_t number;  ///< see name_collectives()
  int64_t users = 1;

  const BackendPtr& wrapped() const { return backend_; }
  const std::shared_ptr<Listener>& listener() const { return listener_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override;
  void startCoalescing() override { backend_->startCoalescing(); }
  WorkPtr endCoalescing() override;

  const std::string getBackendName() const override { return backend_->getBackendName(); }
  OptionsPtr getBackendOptions() override { return backend_->getBackendOptions(); }
  bool supportsSplitting() const override;
  bool supportsCoalescing() const override { return backend_->supportsCoalescing(); }
  bool supportsTimeEstimation() const override { return backend_->supportsTimeEstimation(); }
  bool supportsShrinking() const override { return backend_->supportsShrinking(); }
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks, const OptionsPtr& options) override {
    return backend_->split(store, ranks, options);
  }
  BackendPtr merge(const StorePtr& store, const OptionsPtr& options, const int& rank,
                   const int& size) override {
    return backend_->merge(store, options, rank, size);
  }
  BackendPtr shrink(const std::vector<int64_t>& excluded, int flags, const OptionsPtr& options) override {
    return backend_->shrink(excluded, flags, options);
  }
  void setTimeout(Milliseconds timeout) override { backend_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { backend_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return backend_->getSequenceNumberForGroup(); }
  void registerOnCompletionHook(Hook&& hook) override;
  void waitForPendingWorks() override { backend_->waitForPendingWorks(); }
  void enableCollectivesTiming() override { backend_->enableCollectivesTiming(); }
  void setGroupUid(const std::string& uid) override;
  void eagerConnectSingleDevice(at::Device device) override { backend_->eagerConnectSingleDevice(device); }
  c10d::ErrorType getError() override { return backend_->getError(); }
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return backend_->getMemAllocator(); }
  Tensor allocateTensor(long size, at::TensorOptions options) override {
    return backend_->allocateTensor(size, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return backend_->supportsTensorAlloc(device); }
  void abort() override { backend_->abort(); }
  void shutdown() override { backend_->shutdown(); }

 private:
  /// Issues a send or receive, or a collective that has its number.
  template <class Issue>
  auto issue(Collective collective, const Issue& call);

  /// Issues a collective of all ranks.
  template <class Issue>
  auto issue_all(Collective collective, const Issue& call);

  BackendPtr backend_;
  std::shared_ptr<Listener> listener_;
};

/// Counts the calls of a function for each group. A group of the same name that is made later begins at 1
/// again, as on a rank that has joined with it.
class CallsOfGroups {
 public:
  /// Counts a call, and returns the number of calls for the group.
  int64_t count(c10d::ProcessGroup& group);

 private:
  std::mutex mutex_;
  std::map<const c10d::ProcessGroup*, std::pair<c10::weak_intrusive_ptr<c10d::ProcessGroup>, int64_t>>
      counts_;
};

/// Gives the backends of a group NamedBackends, until remove_names() is called as often. All ranks must call
/// it between the same collectives. Returns a number for remove_names(), or 0 for a group without a store.
int64_t name_collectives(c10d::ProcessGroup& group);

/// Gives a group its own backends again. Does nothing if `number` is that of another group. For a group that
/// was destroyed, null, it ends the listener.
void remove_names(c10d::ProcessGroup* group, int64_t number);

/// Returns the listener of the NamedBackends of a group, or null.
std::shared_ptr<Listener> listener_of(c10d::ProcessGroup& group);

}  // namespace shoestring::distributed
