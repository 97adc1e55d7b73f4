#include <unistd.h>

// Reads and writes a swap file by a pool of threads, for Linux kernels without io_uring.

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "offload/disturb.h"
#include "offload/transfers.h"

namespace shoestring::offload::io {

bool advance(Transfer& t, ssize_t result, int64_t alignment) {
  if (result == -EINTR || result == -EAGAIN) return false;
  if (result < 0) {
    t.error = static_cast<int>(-result);
  } else if (result == 0) {
    t.error = t.is_write ? ENOSPC : kEndOfFile;
  } else {
    t.done += result;
    if (t.done >= t.size) return true;
    // After a short transfer, the next attempt must begin at a multiple of `alignment`, as direct I/O
    // requires.
    const int64_t whole = t.done / alignment * alignment;
    if (whole == t.done || result > t.done - whole) {
      t.done = whole;
      return false;
    }
    // less than one sector was transferred, so another attempt would not help
    t.error = t.is_write ? EIO : kEndOfFile;
  }
  return true;
}

namespace {

// Number of threads. A single read of some MiB keeps a fast disk busy; several threads fill the gaps between
// reads.
constexpr int kThreads = 8;

class Threads final : public Engine {
 public:
  Threads(int fd, int64_t alignment, Finished finished)
      : fd_(fd), alignment_(alignment), finished_(std::move(finished)) {}

  ~Threads() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void submit(Transfer& transfer) override {
    const std::lock_guard lock(mutex_);
    queue_.push_back(&transfer);
    if (idle_ < queue_.size() && threads_.size() < kThreads) threads_.emplace_back([this] { run(); });
    changed_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      --idle_;
      if (queue_.empty()) return;
      Transfer& t = *std::exchange(queue_.front(), nullptr);
      queue_.pop_front();
      lock.unlock();
      transfer(t);
      finished_(t);
      lock.lock();
    }
  }

  void transfer(Transfer& t) const {
    delay();
    ssize_t result;
    do {
      if (const auto fails = failure()) {
        result = *fails;
        continue;
      }
      const auto size = static_cast<size_t>(std::min(t.size - t.done, kAtOnce));
      result = t.is_write ? ::pwrite(fd_, t.memory + t.done, size, t.offset + t.done)
                          : ::pread(fd_, t.memory + t.done, size, t.offset + t.done);
      if (result < 0) result = -errno;
      result = shortened(result, t.size - t.done);
    } while (!advance(t, result, alignment_));
  }

  const int fd_;
  const int64_t alignment_;
  const Finished finished_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Transfer*> queue_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool stop_ = false;
};

}  // namespace

ProcessOwned<Engine> thread_engine(int fd, int64_t alignment, Engine::Finished finished) {
  return make_process_owned<Threads>(fd, alignment, std::move(finished));
}

}  // namespace shoestring::offload::io
