#include "data/queue_device.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

namespace queue_device {
namespace {

using at::Tensor;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int64_t kStreams = 8;
// The memory holds this value once it has been freed.
constexpr int kFreed = 0xEE;

std::atomic<double> copy_seconds{0};
std::atomic<bool> event_times{true};
std::atomic<int64_t> in_use{0}, allocated{0};
thread_local int64_t current = 0;

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// A point in the work of a stream.
class Mark {
 public:
  void reach() {
    {
      const std::lock_guard lock(mutex_);
      reached_ = true;
      time_ = std::chrono::steady_clock::now();
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
  }
  bool is_reached() {
    const std::lock_guard lock(mutex_);
    return reached_;
  }
  // Returns the milliseconds from this point to a later one. Both have been reached.
  double until(const Mark& later) const {
    return std::chrono::duration<double, std::milli>(later.time_ - time_).count();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point time_;
};
using MarkPtr = std::shared_ptr<Mark>;

class Queue {
 public:
  Queue() {
    std::thread([this] { run(); }).detach();
  }

  void add(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      work_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  MarkPtr mark() {
    auto mark = std::make_shared<Mark>();
    add([mark] { mark->reach(); });
    return mark;
  }

 private:
  void run() {
    const at::NoGradGuard no_grad;
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
      }
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
};

// The queues live as long as the process, because their threads do.
Queue& queue(int64_t stream) {
  static auto& all = *new std::vector<Queue>(kStreams);
  return all[static_cast<size_t>(stream)];
}

c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, 0), id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    static std::atomic<int64_t> next{0};
    return stream_of(1 + next++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<MarkPtr*>(*event);
    *event = new MarkPtr(queue(stream.id()).mark());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) queue(stream.id()).add([mark = *static_cast<MarkPtr*>(event)] { mark->wait(); });
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || (*static_cast<MarkPtr*>(event))->is_reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) (*static_cast<MarkPtr*>(event))->wait();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(event_times, "the events of this device have no times");
    return (*static_cast<MarkPtr*>(from))->until(**static_cast<MarkPtr*>(to));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  void synchronizeStream(const c10::Stream& stream) const override { queue(stream.id()).mark()->wait(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

// Memory belongs to the stream in which it was allocated, as in PyTorch's CUDA allocator: once it is freed,
// its stream overwrites it, after the work of the streams that were recorded for it.
struct Memory final : c10::Allocator {
  struct Block {
    size_t size;
    int64_t stream;
    std::vector<int64_t> recorded;
  };

  c10::DataPtr allocate(size_t size) override {
    void* const begin = size == 0 ? nullptr : std::aligned_alloc(512, (size + 511) / 512 * 512);
    if (begin != nullptr) {
      const std::lock_guard lock(mutex);
      blocks[begin] = {size, current, {}};
      in_use += static_cast<int64_t>(size), ++allocated;
    }
    return {begin, begin, &release, c10::Device(kType, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

  static void release(void* begin);

  std::mutex mutex;
  std::map<void*, Block> blocks;
};

Memory& memory() {
  static auto& one = *new Memory;
  return one;
}

void Memory::release(void* begin) {
  if (begin == nullptr) return;
  Memory& m = memory();
  Block block;
  {
    const std::lock_guard lock(m.mutex);
    block = m.blocks.extract(begin).mapped();
  }
  in_use -= static_cast<int64_t>(block.size);
  std::vector<MarkPtr> others;
  for (const int64_t stream : block.recorded) others.push_back(queue(stream).mark());
  queue(block.stream).add([begin, others, size = block.size] {
    for (const MarkPtr& mark : others) mark->wait();
    std::memset(begin, kFreed, size);
    std::free(begin);
  });
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  Memory::Block& block = m.blocks.at(data.get());
  if (stream.id() != block.stream) block.recorded.push_back(stream.id());
}

// Returns a CPU tensor over the memory of t, for use by the threads of streams.
Tensor on_host(const Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), at::TensorOptions().dtype(t.scalar_type()));
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool is_upload = from.is_cpu();
  queue(current).add([from = on_host(from), to = on_host(to), is_upload] {
    if (is_upload) sleep(copy_seconds);
    to.copy_(from);
  });
  if (!non_blocking) synchronize();
  return to;
}

Tensor& fill(Tensor& t, const at::Scalar& value) {
  queue(current).add([host = on_host(t), value]() mutable { host.fill_(value); });
  return t;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("fill_.Scalar", &fill);
}

TORCH_LIBRARY_FRAGMENT(shoestring_tests, m) {
  m.def("install_queue_device() -> Device", &install);
  m.def("set_copy_seconds(float seconds) -> ()", &set_copy_seconds);
  m.def("set_event_times(bool exist) -> ()", [](bool exist) { event_times = exist; });
  m.def("queue_compute(Tensor x, float seconds) -> Tensor", &compute);
}

}  // namespace

c10::Device install() {
  static const c10::impl::DeviceGuardImplRegistrar registrar(kType, new Guard);
  return {kType, 0};
}

void set_copy_seconds(double seconds) { copy_seconds = seconds; }

Tensor compute(const Tensor& x, double seconds) {
  Tensor result = at::empty_like(x);
  queue(current).add([from = on_host(x), to = on_host(result), seconds] {
    sleep(seconds);
    to.copy_(from);
  });
  return result;
}

int64_t bytes_in_use() { return in_use; }

int64_t allocations() { return allocated; }

void synchronize() { queue(current).mark()->wait(); }

}  // namespace queue_device
