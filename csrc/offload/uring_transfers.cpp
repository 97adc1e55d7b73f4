// Reads and writes a swap file through io_uring.

#include "offload/transfers.h"

#ifndef SHOESTRING_IO_URING

namespace shoestring::offload::io {
ProcessOwned<Engine> io_uring_engine(int, int64_t, Engine::Finished) { return nullptr; }
}  // namespace shoestring::offload::io

#else

#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "offload/disturb.h"

namespace shoestring::offload::io {
namespace {

// Maximum number of transfers in the kernel at a time. With 1 MiB each, they keep any disk busy.
constexpr unsigned kDepth = 64;

// Runs transfers through io_uring. The thread that calls submit() submits them; one thread, the reaper,
// handles completions.
class Ring final : public Engine {
 public:
  Ring(int fd, int64_t alignment, Finished finished)
      : fd_(fd), alignment_(alignment), finished_(std::move(finished)) {}

  bool open() {
    // The submission queue has 2 * kDepth entries, since tests submit a delay before each transfer.
    if (::io_uring_queue_init(2 * kDepth, &ring_, 0) != 0) return false;
    io_uring_probe* probe = ::io_uring_get_probe_ring(&ring_);
    const bool good = probe != nullptr && ::io_uring_opcode_supported(probe, IORING_OP_READ) != 0;
    ::io_uring_free_probe(probe);
    if (!good) {
      ::io_uring_queue_exit(&ring_);
      return false;
    }
    reaper_ = std::thread([this] { reap(); });
    return true;
  }

  ~Ring() override {
    if (!reaper_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
      ::io_uring_prep_nop(entry);
      ::io_uring_sqe_set_data64(entry, kStop);
      send();
    }
    reaper_.join();
    ::io_uring_queue_exit(&ring_);
  }

  void submit(Transfer& transfer) override {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(&transfer);
    fill();
  }

  // A forked child closes the queues without submitting anything. It shares their memory with the parent, so
  // its entries would run in the parent.
  void close_inherited() override { ::io_uring_queue_exit(&ring_); }

 private:
  // Tags of submissions that are not transfers. The tag of a transfer is its address, which is never 1 or 2.
  static constexpr uint64_t kStop = 1, kDelay = 2;

  void fill() {
    bool any = false;
    for (; in_kernel_ < kDepth && !waiting_.empty(); ++in_kernel_, any = true) {
      Transfer& t = *waiting_.front();
      waiting_.pop_front();
      if (const int64_t us = random_delay_us(); us > 0) {
        t.delay_ns[1] = us * 1000;
        static_assert(sizeof t.delay_ns == sizeof(__kernel_timespec));
        io_uring_sqe* wait = ::io_uring_get_sqe(&ring_);
        auto* until = reinterpret_cast<__kernel_timespec*>(t.delay_ns);
        ::io_uring_prep_timeout(wait, until, 0, IORING_TIMEOUT_ETIME_SUCCESS);
        wait->flags |= IOSQE_IO_LINK;
        ::io_uring_sqe_set_data64(wait, kDelay);
      }
      io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
      const auto size = static_cast<unsigned>(std::min(t.size - t.done, kAtOnce));
      t.failure = failure();
      if (t.failure) {
        ::io_uring_prep_nop(entry);
      } else if (t.is_write) {
        ::io_uring_prep_write(entry, fd_, t.memory + t.done, size, static_cast<uint64_t>(t.offset + t.done));
      } else {
        ::io_uring_prep_read(entry, fd_, t.memory + t.done, size, static_cast<uint64_t>(t.offset + t.done));
      }
      ::io_uring_sqe_set_data(entry, &t);
    }
    if (any) send();
  }

  // Submits all entries of the queue to the kernel. Entries that the kernel does not take now stay in the
  // queue and are submitted with later ones. The kernel refuses entries only if it is out of memory; then
  // send() retries until a transfer has finished.
  void send() {
    int result;
    do {
      result = ::io_uring_submit(&ring_);
      if (result == -EAGAIN || result == -EBUSY) std::this_thread::yield();
    } while (result == -EINTR || result == -EAGAIN || result == -EBUSY);
  }

  void reap() {
    for (;;) {
      io_uring_cqe* entry = nullptr;
      if (::io_uring_wait_cqe(&ring_, &entry) != 0) continue;  // only a signal can interrupt the wait
      const uint64_t data = ::io_uring_cqe_get_data64(entry);
      const ssize_t result = entry->res;
      ::io_uring_cqe_seen(&ring_, entry);
      if (data == kStop) return;
      if (data == kDelay) continue;
      auto& t = *reinterpret_cast<Transfer*>(data);
      const bool done = advance(t, t.failure.value_or(shortened(result, t.size - t.done)), alignment_);
      {
        const std::lock_guard lock(mutex_);
        --in_kernel_;
        if (!done) waiting_.push_front(&t);
        fill();
      }
      if (done) finished_(t);
    }
  }

  const int fd_;
  const int64_t alignment_;
  const Finished finished_;
  io_uring ring_{};
  std::mutex mutex_;  // guards the submission queue and the fields below
  std::deque<Transfer*> waiting_;
  unsigned in_kernel_ = 0;
  std::thread reaper_;
};

}  // namespace

ProcessOwned<Engine> io_uring_engine(int fd, int64_t alignment, Engine::Finished finished) {
  auto ring = make_process_owned<Ring>(fd, alignment, std::move(finished));
  if (!ring->open()) return nullptr;
  return ring;
}

}  // namespace shoestring::offload::io

#endif
