#include "streams.h"

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include "pinned_memory.h"
#include "stacks.h"

namespace simdev {
namespace {

thread_local std::array<int, kDevices> current_streams = [] {
  std::array<int, kDevices> all{};
  for (int d = 0; d < kDevices; ++d) all[d] = d * kStreamsPerDevice;
  return all;
}();
thread_local int device = 0;
thread_local bool in_stream = false;

struct Queue {
  int index = 0;
  Clock clock{};  // guarded by records(); its own entry is the number of the last operation

  std::mutex mutex;  // guards what follows
  std::condition_variable work, passed;
  std::deque<Operation> operations;
  uint64_t done = 0, demanded = 0;
  std::mt19937_64 random;
  uint64_t seed = 0;
  bool has_thread = false;
};

// The queues live as long as the process, because their threads do.
Queue& queue(int stream) {
  static auto& all = []() -> std::array<Queue, kStreams>& {
    auto& queues = *new std::array<Queue, kStreams>;
    for (int i = 0; i < kStreams; ++i) queues[i].index = i;
    return queues;
  }();
  return all[stream];
}

struct Error {
  std::atomic<bool> there{false};
  std::mutex mutex;
  std::string text;
};
Error& error() {
  static auto& one = *new Error;
  return one;
}

struct Synchronisations {
  std::mutex mutex;
  std::vector<std::string> reasons;
  std::atomic<int64_t> count{0};
};
Synchronisations& synchronisations() {
  static auto& one = *new Synchronisations;
  return one;
}
std::atomic<int64_t> operations{0};

void demand(Position p) {
  Queue& q = queue(p.stream);
  {
    const std::lock_guard lock(q.mutex);
    q.demanded = std::max(q.demanded, p.number);
  }
  q.work.notify_one();
}

void run(const Operation& operation, int stream) {
  if (operation.is_kernel && error().there) return;
  const auto fail = [&](const char* text) {
    const std::lock_guard lock(error().mutex);
    if (error().there) return;
    error().text = std::string(operation.name) + " failed on stream " + std::to_string(stream) +
                   ", and this call is only where the host learns of it: " + text;
    error().there = true;
  };
  try {
    operation.run();
  } catch (const c10::Error& e) {
    fail(e.what_without_backtrace());
  } catch (const std::exception& e) {
    fail(e.what());
  }
}

void work(Queue& q) {
  in_stream = true;
  device = device_of_stream(q.index);
  current_streams[device] = q.index;
  at::set_num_threads(1);
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::NoGradGuard no_grad;
  while (true) {
    Operation operation;
    int64_t delay = 0;
    {
      std::unique_lock lock(q.mutex);
      q.work.wait(lock, [&] { return !q.operations.empty() && (!config().lazy || q.demanded > q.done); });
      operation = std::move(q.operations.front());
      q.operations.pop_front();
      if (q.seed != config().seed) q.random.seed((q.seed = config().seed) * kStreams + q.index);
      const uint64_t drawn = q.random();
      if (config().delay_us > 0 && drawn % 4 == 0) delay = (drawn >> 8) % config().delay_us;
    }
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    run(operation, q.index);
    operation = Operation();  // frees what the operation holds before others see that it is over
    {
      const std::lock_guard lock(q.mutex);
      ++q.done;
    }
    q.passed.notify_all();
  }
}

}  // namespace

Config& config() {
  static auto& one = *new Config;
  return one;
}

std::mutex& records() {
  static auto& one = *new std::mutex;
  return one;
}

int current_stream(int of) { return current_streams[of]; }
int current_device() { return device; }
void set_current_stream(int stream) { current_streams[device_of_stream(stream)] = stream; }
void set_current_device(int to) {
  TORCH_CHECK(to >= 0 && to < kDevices, "simdev: device: expected 0 to ", kDevices - 1, ", received ", to);
  device = to;
}
c10::Stream to_c10(int stream) {
  const auto index = static_cast<c10::DeviceIndex>(device_of_stream(stream));
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), stream % kStreamsPerDevice);
}
int from_c10(const c10::Stream& stream) {
  return stream.device_index() * kStreamsPerDevice + static_cast<int>(stream.id());
}
int next_pool_stream(int of) {
  static std::array<std::atomic<unsigned>, kDevices> next{};
  return of * kStreamsPerDevice + 1 + static_cast<int>(next[of]++ % (kStreamsPerDevice - 1));
}

Position enqueue_locked(int stream, Operation operation) {
  Queue& q = queue(stream);
  merge(q.clock, known_to_host());
  const Position position{stream, ++q.clock[stream]};
  check_accesses(position, q.clock, operation.name, operation.accesses);
  ++operations;
  {
    const std::lock_guard lock(q.mutex);
    if (!q.has_thread) std::thread(work, std::ref(q)).detach();
    q.has_thread = true;
    q.operations.push_back(std::move(operation));
    // a lazy stream must not keep the arguments of too many operations
    if (q.operations.size() > 20000) q.demanded = position.number;
  }
  q.work.notify_one();
  return position;
}

Position enqueue(int stream, Operation operation) {
  check_error();
  prepare_stack();
  Position position;
  {
    const std::lock_guard lock(records());
    position = enqueue_locked(stream, std::move(operation));
  }
  if (config().blocking && !in_stream) {
    wait_silently(position);
    check_error();
  }
  return position;
}

Position position_of(int stream) {
  const std::lock_guard lock(records());
  return {stream, queue(stream).clock[stream]};
}
const Clock& clock_locked(int stream) { return queue(stream).clock; }
void order_locked(int stream, const Clock& clock) { merge(queue(stream).clock, clock); }

bool is_over(Position p) {
  demand(p);
  Queue& q = queue(p.stream);
  const std::lock_guard lock(q.mutex);
  return q.done >= p.number;
}

void wait_silently(Position p) {
  demand(p);
  Queue& q = queue(p.stream);
  std::unique_lock lock(q.mutex);
  q.passed.wait(lock, [&] { return q.done >= p.number; });
}

void host_knows(const Clock& clock) {
  host_learns(clock);
  const std::lock_guard lock(records());
  release_pinned(clock);
}

void synchronize(Position position, const Clock& clock, const char* reason) {
  {
    Synchronisations& all = synchronisations();
    ++all.count;
    std::string text = reason;
    if (config().stacks) text += "\n" + python_stack();
    const std::lock_guard lock(all.mutex);
    if (all.reasons.size() < 10000) all.reasons.push_back(std::move(text));
  }
  wait_silently(position);
  host_knows(clock);
  check_error();
}

void synchronize_stream(int stream, const char* reason) {
  Clock clock;
  {
    const std::lock_guard lock(records());
    merge(queue(stream).clock, known_to_host());
    clock = queue(stream).clock;
  }
  synchronize({stream, clock[stream]}, clock, reason);
}

void check_error() {
  if (!error().there || in_stream) return;
  std::string text;
  {
    const std::lock_guard lock(error().mutex);
    text = error().text;
  }
  TORCH_CHECK(false, "simdev: ", text);
}
void clear_error() { error().there = false; }

bool is_stream_thread() { return in_stream; }

std::vector<std::string> take_synchronisations() {
  Synchronisations& all = synchronisations();
  const std::lock_guard lock(all.mutex);
  return std::exchange(all.reasons, {});
}
int64_t count_synchronisations() { return synchronisations().count; }
int64_t count_operations() { return operations; }

}  // namespace simdev
