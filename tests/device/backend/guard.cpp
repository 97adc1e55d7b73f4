// What PyTorch asks of a device: the current device and stream, events, generators and allocators.

#include <chrono>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device_memory.h"
#include "generator.h"
#include "guard.h"
#include "pinned_memory.h"
#include "streams.h"

namespace simdev {
namespace {

// The stream's position when the event was recorded, and what is known to be over once the stream is there.
struct Event {
  Position position;
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

c10::Device to_device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }
int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = current_device();
    set_current_device(index_of(device));
    return to_device(before);
  }
  c10::Device getDevice() const override { return to_device(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(index_of(device));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return to_c10(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return to_c10(index_of(device) * kStreamsPerDevice);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return to_c10(next_pool_stream(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return to_c10(next_pool_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int before = current_stream(stream.device_index());
    set_current_stream(from_c10(stream));
    return to_c10(before);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(intptr_t{from_c10(stream)} + 1);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Event now;
    record_at(now, from_c10(stream));
    return query(now);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(from_c10(stream), "a stream is synchronised");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    for (int i = 0; i < kStreamsPerDevice; ++i)
      synchronize_stream(device * kStreamsPerDevice + i, "a device is synchronised");
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device,
              c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(),
                "simdev: event: expected a stream of device ", int{device},
                ", where the event was recorded first, received one of device ", int{stream.device_index()},
                ". Make another event.");
    check_error();
    if (*event == nullptr) *event = new Event;
    record_at(*static_cast<Event*>(*event), from_c10(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const Event e = *static_cast<Event*>(event);
    const int waiter = from_c10(stream);
    const std::lock_guard lock(records());
    order_locked(waiter, e.clock);
    if (e.position.stream == waiter) return;
    enqueue_locked(waiter, {"wait_event()", [p = e.position] { wait_silently(p); }, {}, /*is_kernel=*/false});
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Event e = *static_cast<Event*>(event);
    synchronize(e.position, e.clock, "an event is synchronised");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    const auto time = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, from_c10(stream));
  }

 private:
  static void record_at(Event& event, int stream) {
    const std::lock_guard lock(records());
    order_locked(stream, known_to_host());
    event = {{stream, clock_locked(stream)[stream]}, clock_locked(stream), std::chrono::steady_clock::now()};
  }
  static bool query(const Event& event) {
    if (!is_over(event.position)) return false;
    host_knows(event.clock);
    return true;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Device getDeviceFromPtr(void* p) const override { return to_device(device_of(p)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::OptionalDeviceGuard guard(storage.device());
    auto data = device_allocator()->allocate(size);
    if (const size_t kept = std::min(size, storage.nbytes()); kept > 0)
      device_allocator()->copy_data(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

}  // namespace

void register_backend() {
  c10::register_privateuse1_backend("simdev");
  c10::SetAllocator(kType, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(kType, pinned_allocator(), 1);
  watch_host_accesses();
}

}  // namespace simdev
