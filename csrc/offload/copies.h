#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace shoestring {

/// Copies between host memory and a device, beside what the device does: on streams of its own, or in a thread where
/// the device is the CPU.
class Copies {
 public:
  struct Copy {
    at::Tensor to, from;  // of one dtype and size, contiguous
  };
  using Ticket = int64_t;

  explicit Copies(c10::Device device) : device_(device) {}
  ~Copies();
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  /// To the device: at once, and what the current stream does from receive() on comes after it.
  Ticket send(std::vector<Copy> copies) { return add(std::move(copies), true); }
  void receive(Ticket ticket);
  /// From the device, after what the current stream does by now; the host may use it after wait().
  Ticket fetch(std::vector<Copy> copies) { return add(std::move(copies), false); }
  void wait(Ticket ticket);
  bool is_finished(Ticket ticket);

 private:
  Ticket add(std::vector<Copy> copies, bool to_device);
  void run();

  const c10::Device device_;
  std::mutex mutex_;
  Ticket next_ = 0;
  // A GPU's.
  std::optional<c10::Stream> streams_[2];
  std::map<Ticket, c10::Event> events_;
  // The CPU's.
  std::condition_variable changed_;
  std::deque<std::pair<Ticket, std::vector<Copy>>> queue_;
  std::set<Ticket> running_;  // and waiting
  std::thread thread_;
  bool stop_ = false;
};

}  // namespace shoestring
