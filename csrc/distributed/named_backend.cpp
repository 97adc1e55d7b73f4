// A backend that names ranks and collectives in its errors.

#include "distributed/named_backend.h"

#include <iterator>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "distributed/backends.h"

namespace shoestring::distributed {
namespace {

using c10d::ProcessGroup;
using c10d::Work;
using Future = c10::ivalue::Future;

// Raises the error of a collective.
[[noreturn]] void fail(Listener& listener, const Collective& collective, std::exception_ptr pointer) {
  try {
    std::rethrow_exception(std::move(pointer));
  } catch (const c10::OutOfMemoryError&) {
    throw;  // callers try smaller batches
  } catch (const std::exception& error) {
    TORCH_CHECK_WITH(DistBackendError, false, listener.rank(), collective.text(), ": ", first_line(error),
                     listener.verdict());
  }
}

std::exception_ptr explained(Listener& listener, const Collective& collective, std::exception_ptr pointer) {
  try {
    fail(listener, collective, std::move(pointer));
  } catch (const std::exception&) {
    return std::current_exception();
  }
}

// The work of another backend. Its future holds no reference to the backend, which must not be destroyed by
// one of its own threads.
class NamedWork : public Work {
 public:
  NamedWork(c10::intrusive_ptr<Work> work, std::shared_ptr<Listener> listener, Collective collective)
      : Work(-1, work->retrieveOpType()), work_(std::move(work)), listener_(std::move(listener)),
        collective_(std::move(collective)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    try {
      return work_->wait(timeout);
    } catch (c10::Error& error) {
      // The caller's own timeout is no failure. The caller may wait again.
      const bool may_go_on =
          timeout != kNoTimeout && !work_->isCompleted() && dynamic_cast<c10::DistError*>(&error) == nullptr;
      if (!may_go_on) fail(*listener_, collective_, std::current_exception());
      error.add_context(listener_->rank() + collective_.text());
      throw;
    } catch (const std::exception&) {
      fail(*listener_, collective_, std::current_exception());
    }
  }

  c10::intrusive_ptr<Future> getFuture() override {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = work_->getFuture();
    // Futures of GPUs hold no errors, and callbacks would run on other streams.
    if (!future_ || !future_->devices().empty()) return future_;
    future_ = future_->then(
        [listener = listener_, collective = collective_](Future& done) {
          if (done.hasError()) fail(*listener, collective, done.exception_ptr());
          return done.value();
        },
        future_->elementType());
    return future_;
  }

  std::exception_ptr exception() const override {
    const std::exception_ptr error = work_->exception();
    return error ? explained(*listener_, collective_, error) : error;
  }

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  void blockCurrentStream() override { work_->blockCurrentStream(); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<Future> getFutureResult() override { return work_->getFutureResult(); }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  const c10::intrusive_ptr<Work> work_;
  const std::shared_ptr<Listener> listener_;
  const Collective collective_;
  c10::intrusive_ptr<Future> future_;
};

Collective described(const char* name, const std::vector<at::Tensor>& tensors, int64_t root = -1,
                     const c10d::ReduceOp& reduction = c10d::ReduceOp::SUM) {
  Collective collective;
  collective.name = name;
  collective.tensors = tensors.size();
  collective.root = root;
  collective.reduction = reduction.op_;
  for (const at::Tensor& tensor : tensors) collective.elements += tensor.numel();
  if (!tensors.empty()) {
    collective.sizes = tensors[0].sizes().vec();
    collective.dtype = tensors[0].scalar_type();
  }
  return collective;
}

// Ranks may send different numbers of elements.
Collective described_uneven(const char* name, const std::vector<at::Tensor>& tensors) {
  Collective collective = described(name, tensors);
  collective.elements = 0;
  return collective;
}

const std::vector<at::Tensor>& first(const std::vector<std::vector<at::Tensor>>& lists,
                                     const std::vector<at::Tensor>& otherwise) {
  return lists.empty() ? otherwise : lists[0];
}

}  // namespace

NamedBackend::NamedBackend(BackendPtr backend, std::shared_ptr<Listener> listener, int64_t of)
    : Backend(backend->getRank(), backend->getSize()), number(of), backend_(std::move(backend)),
      listener_(std::move(listener)) {
  pg_uid_ = backend_->getGroupUid();
  pg_desc_ = backend_->getGroupDesc();
  bound_device_id_ = backend_->getBoundDeviceId();
  if (backend_->hasHooks()) onCompletionHook_ = [](const auto&) {};  // hasHooks() is not virtual
}

template <class Issue>
auto NamedBackend::issue(Collective collective, const Issue& call) {
  try {
    if constexpr (std::is_void_v<decltype(call())>) {
      call();
    } else {
      WorkPtr work = call();
      if (work) work = c10::make_intrusive<NamedWork>(std::move(work), listener_, std::move(collective));
      return work;
    }
  } catch (const c10::DistError&) {
    fail(*listener_, collective, std::current_exception());
  } catch (c10::Error& error) {  // an argument is invalid, so the other ranks are not asked
    error.add_context(listener_->rank() + collective.text());
    throw;
  } catch (const std::exception&) {
    fail(*listener_, collective, std::current_exception());
  }
}

template <class Issue>
auto NamedBackend::issue_all(Collective collective, const Issue& call) {
  listener_->record(collective);
  // 11 bits of the number and 20 bits of the key. Tags of monitoredBarrier must not be negative.
  const auto number = static_cast<uint32_t>(collective.number) & 0x7ff;
  set_gloo_tag(*backend_, number << 20 | (collective.key() & 0xfffff));
  return issue(std::move(collective), call);
}

NamedBackend::WorkPtr NamedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return issue_all(described("broadcast from", tensors, options.rootRank),
                   [&] { return backend_->broadcast(tensors, options); });
}

NamedBackend::WorkPtr NamedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return issue_all(described("all_reduce", tensors, -1, options.reduceOp),
                   [&] { return backend_->allreduce(tensors, options); });
}

NamedBackend::WorkPtr NamedBackend::allreduce_sparse(Tensors& tensors,
                                                     const c10d::AllreduceOptions& options) {
  return issue_all(described("all_reduce (sparse)", tensors, -1, options.reduceOp),
                   [&] { return backend_->allreduce_sparse(tensors, options); });
}

NamedBackend::WorkPtr NamedBackend::allreduce_coalesced(Tensors& tensors,
                                                        const c10d::AllreduceCoalescedOptions& options) {
  return issue_all(described("all_reduce_coalesced", tensors, -1, options.reduceOp),
                   [&] { return backend_->allreduce_coalesced(tensors, options); });
}

NamedBackend::WorkPtr NamedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return issue_all(described("reduce to", tensors, options.rootRank, options.reduceOp),
                   [&] { return backend_->reduce(tensors, options); });
}

NamedBackend::WorkPtr NamedBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  return issue_all(described("all_gather", first(outputs, inputs)),
                   [&] { return backend_->allgather(outputs, inputs, options); });
}

NamedBackend::WorkPtr NamedBackend::_allgather_base(Tensor& output, Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  return issue_all(described("all_gather_into_tensor", {output}),
                   [&] { return backend_->_allgather_base(output, input, options); });
}

NamedBackend::WorkPtr NamedBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  return issue_all(described("all_gather_coalesced", inputs),
                   [&] { return backend_->allgather_coalesced(outputs, inputs, options); });
}

NamedBackend::WorkPtr NamedBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& options) {
  return issue_all(described("all_gather_into_tensor_coalesced", outputs),
                   [&] { return backend_->allgather_into_tensor_coalesced(outputs, inputs, options); });
}

NamedBackend::WorkPtr NamedBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::GatherOptions& options) {
  return issue_all(described("gather to", inputs, options.rootRank),
                   [&] { return backend_->gather(outputs, inputs, options); });
}

NamedBackend::WorkPtr NamedBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ScatterOptions& options) {
  return issue_all(described("scatter from", outputs, options.rootRank),
                   [&] { return backend_->scatter(outputs, inputs, options); });
}

NamedBackend::WorkPtr NamedBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  return issue_all(described("reduce_scatter", first(inputs, outputs), -1, options.reduceOp),
                   [&] { return backend_->reduce_scatter(outputs, inputs, options); });
}

NamedBackend::WorkPtr NamedBackend::_reduce_scatter_base(Tensor& output, Tensor& input,
                                                         const c10d::ReduceScatterOptions& options) {
  return issue_all(described("reduce_scatter_tensor", {input}, -1, options.reduceOp),
                   [&] { return backend_->_reduce_scatter_base(output, input, options); });
}

NamedBackend::WorkPtr NamedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return issue_all(described("reduce_scatter_tensor_coalesced", inputs, -1, options.reduceOp),
                   [&] { return backend_->reduce_scatter_tensor_coalesced(outputs, inputs, options); });
}

NamedBackend::WorkPtr NamedBackend::alltoall_base(Tensor& output, Tensor& input,
                                                  std::vector<int64_t>& output_splits,
                                                  std::vector<int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& options) {
  return issue_all(described_uneven("all_to_all_single", {input}), [&] {
    return backend_->alltoall_base(output, input, output_splits, input_splits, options);
  });
}

NamedBackend::WorkPtr NamedBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                             const c10d::AllToAllOptions& options) {
  return issue_all(described_uneven("all_to_all", inputs),
                   [&] { return backend_->alltoall(outputs, inputs, options); });
}

NamedBackend::WorkPtr NamedBackend::send(Tensors& tensors, int to, int tag) {
  return issue(described("send to", tensors, to), [&] { return backend_->send(tensors, to, tag); });
}

NamedBackend::WorkPtr NamedBackend::recv(Tensors& tensors, int from, int tag) {
  return issue(described("recv from", tensors, from), [&] { return backend_->recv(tensors, from, tag); });
}

NamedBackend::WorkPtr NamedBackend::recvAnysource(Tensors& tensors, int tag) {
  return issue(described("recv", tensors), [&] { return backend_->recvAnysource(tensors, tag); });
}

NamedBackend::WorkPtr NamedBackend::barrier(const c10d::BarrierOptions& options) {
  return issue_all(described("barrier", {}), [&] { return backend_->barrier(options); });
}

void NamedBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) {
  issue_all(described("monitored_barrier", {}), [&] { backend_->monitoredBarrier(options, wait_all); });
}

NamedBackend::WorkPtr NamedBackend::endCoalescing() {
  return issue(described("coalesced collectives", {}), [&] { return backend_->endCoalescing(); });
}

bool NamedBackend::supportsSplitting() const {
  // new_group() of Python assigns an NCCL backend that can be split to a field of type ProcessGroupNCCL.
  return backend_->getBackendName() == "gloo" && backend_->supportsSplitting();
}

void NamedBackend::registerOnCompletionHook(Hook&& hook) {
  backend_->registerOnCompletionHook(std::move(hook));
  onCompletionHook_ = [](const auto&) {};
}

void NamedBackend::setGroupUid(const std::string& uid) {
  pg_uid_ = uid;
  backend_->setGroupUid(uid);
}

namespace {

// ProcessGroup::setBackend() adds backends and never replaces them.
struct Backends : ProcessGroup {
  static void replace(ProcessGroup& group, const NamedBackend::BackendPtr& from,
                      const NamedBackend::BackendPtr& to) {
    for (auto& [device, backend] : group.*&Backends::deviceTypeToBackend_)
      if (backend == from) backend = to;
    for (auto& [type, backend] : group.*&Backends::backendTypeToBackend_)
      if (backend == from) backend = to;
  }
};

std::vector<NamedBackend::BackendPtr> backends_of(ProcessGroup& group) {
  std::vector<NamedBackend::BackendPtr> backends;
  for (const c10::Device& device : group.getDeviceTypes())
    backends.push_back(group.getBackend(device.type()));
  return backends;
}

// Returns the first NamedBackend of a group, which counts the users of all, or null.
NamedBackend* named(ProcessGroup& group) {
  for (const auto& backend : backends_of(group))
    if (auto* named_backend = dynamic_cast<NamedBackend*>(backend.get())) return named_backend;
  return nullptr;
}

}  // namespace

std::shared_ptr<Listener> listener_of(ProcessGroup& group) {
  const NamedBackend* backend = named(group);
  return backend != nullptr ? backend->listener() : nullptr;
}

namespace {

std::mutex names_mutex;
std::map<int64_t, std::weak_ptr<Listener>> listeners;  // the listeners of this process, by number

}  // namespace

int64_t CallsOfGroups::count(ProcessGroup& group) {
  const std::lock_guard lock(mutex_);
  const auto expired = [](const auto& item) { return item.second.first.expired(); };
  for (auto it = counts_.begin(); it != counts_.end();) it = expired(*it) ? counts_.erase(it) : std::next(it);
  const c10::weak_intrusive_ptr<ProcessGroup> weak(c10::intrusive_ptr<ProcessGroup>::reclaim_copy(&group));
  return ++counts_.try_emplace(&group, weak, 0).first->second.second;
}

int64_t name_collectives(ProcessGroup& group) {
  if (NamedBackend* registered = named(group)) {
    ++registered->users;
    return registered->number;
  }
  const auto backends = backends_of(group);
  if (backends.empty() || !group.getStore()) return 0;
  const std::lock_guard lock(names_mutex);
  const int64_t number = listeners.empty() ? 1 : listeners.rbegin()->first + 1;
  // All ranks name the collectives of a group equally often.
  static CallsOfGroups calls;
  const auto prefix = c10::str("shoestring/listener/", calls.count(group));
  const auto store = c10::make_intrusive<c10d::PrefixStore>(prefix, group.getStore());
  const auto listener = std::make_shared<Listener>(*store, group.getRank(), group.getSize());
  listeners[number] = listener;
  for (const auto& backend : backends)
    Backends::replace(group, backend, c10::make_intrusive<NamedBackend>(backend, listener, number));
  return number;
}

void remove_names(ProcessGroup* group, int64_t number) {
  if (group == nullptr) {  // it was destroyed, but may be in use
    std::unique_lock lock(names_mutex);
    const auto entry = listeners.find(number);
    const auto listener = entry == listeners.end() ? nullptr : entry->second.lock();
    lock.unlock();
    if (listener) listener->end();
    return;
  }
  NamedBackend* first = named(*group);
  if (first == nullptr || first->number != number || --first->users > 0) return;
  for (const auto& backend : backends_of(*group))
    if (const auto* named_backend = dynamic_cast<const NamedBackend*>(backend.get()))
      Backends::replace(*group, backend, named_backend->wrapped());
}

}  // namespace shoestring::distributed
