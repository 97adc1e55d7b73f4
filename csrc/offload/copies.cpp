#include "offload/copies.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>

#include "io/disturb.h"

namespace shoestring {

using c10::impl::VirtualGuardImpl;

Copies::~Copies() {
  for (auto& [ticket, event] : events_) event.synchronize();
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Copies::Ticket Copies::add(std::vector<Copy> copies, bool to_device) {
  const std::lock_guard lock(mutex_);
  const Ticket ticket = next_++;
  if (device_.is_cpu()) {
    running_.insert(ticket);
    queue_.emplace_back(ticket, std::move(copies));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    changed_.notify_all();
    return ticket;
  }
  const VirtualGuardImpl guard(device_.type());
  auto& stream = streams_[to_device];
  if (!stream) stream = guard.getStreamFromGlobalPool(device_, /*isHighPriority=*/false);
  if (!to_device) {
    c10::Event before(device_.type());
    before.record(guard.getStream(device_));
    before.block(*stream);
  }
  const c10::StreamGuard on(*stream);
  for (const Copy& copy : copies) copy.to.copy_(copy.from, /*non_blocking=*/true);
  c10::Event after(device_.type());
  after.record(*stream);
  events_.emplace(ticket, std::move(after));
  return ticket;
}

void Copies::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto [ticket, copies] = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    io::delay();
    for (const Copy& copy : copies) {
      std::memcpy(copy.to.mutable_data_ptr(), copy.from.const_data_ptr(), copy.to.nbytes());
    }
    copies.clear();
    lock.lock();
    running_.erase(ticket);
    changed_.notify_all();
  }
}

void Copies::receive(Ticket ticket) {
  if (device_.is_cpu()) return wait(ticket);
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(ticket);
  if (found == events_.end()) return;
  found->second.block(VirtualGuardImpl(device_.type()).getStream(device_));
  events_.erase(found);
}

void Copies::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  if (device_.is_cpu()) return changed_.wait(lock, [&] { return running_.count(ticket) == 0; });
  const auto found = events_.find(ticket);
  if (found == events_.end()) return;
  found->second.synchronize();
  events_.erase(found);
}

bool Copies::is_finished(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  if (device_.is_cpu()) return running_.count(ticket) == 0;
  const auto found = events_.find(ticket);
  return found == events_.end() || found->second.query();
}

}  // namespace shoestring
