#include "offload/swap_file.h"

// Implements a swap file that is read and written past the page cache.

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "offload/disturb.h"

namespace shoestring::offload {

using io::Transfer;

SwapFile::SwapFile(std::string caller, const std::string& folder, Backend backend)
    : caller_(std::move(caller)), folder_(folder) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
  for (int i = 0; fd_ < 0; ++i) {
    path_ = folder + "/shoestring-swap-" + std::to_string(::getpid()) + "-" + std::to_string(i);
    fd_ = ::open(path_.c_str(), kFlags | O_DIRECT, 0600);
    // Some file systems create the file although they refuse O_DIRECT, so it must be removed.
    if (fd_ < 0 && errno == EINVAL) {
      ::unlink(path_.c_str());
      direct_ = false;
      fd_ = ::open(path_.c_str(), kFlags, 0600);
    }
    if (fd_ < 0 && errno != EEXIST) fail("cannot create the file", errno);
  }
  ::unlink(path_.c_str());
  const auto finished = [this](Transfer& t) {
    const std::lock_guard lock(waits_->mutex);
    t.finished = true;
    waits_->finished.notify_all();
  };
  if (backend == Backend::kBest) engine_ = io::io_uring_engine(fd_, kAlignment, finished);
  uring_ = engine_ != nullptr;
  if (!uring_) engine_ = io::thread_engine(fd_, kAlignment, finished);
}

SwapFile::~SwapFile() {
  if (process_.is_here()) {
    std::unique_lock lock(waits_->mutex);
    for (const auto& [ticket, transfer] : transfers_) {
      waits_->finished.wait(lock, [t = transfer.get()] { return t->finished; });
    }
  } else {
    engine_->close_inherited();
  }
  engine_.reset();
  ::close(fd_);
}

int64_t SwapFile::allocate(int64_t size) {
  process_.check(caller_);
  TORCH_CHECK(size >= 0 && size % kAlignment == 0, caller_, ": ", path_, ": size: expected a multiple of ",
              kAlignment, " bytes, received ", size);
  if (size == 0) return 0;
  const std::lock_guard lock(waits_->mutex);
  int64_t offset = extents_.allocate(size);
  if (offset < 0) {
    grow(size_ + size - extents_.at_end(size_));
    offset = extents_.allocate(size);
  }
  return offset;
}

void SwapFile::free(int64_t offset, int64_t size) {
  if (size == 0 || !process_.is_here()) return;
  const std::lock_guard lock(waits_->mutex);
  extents_.free(offset, size);
}

void SwapFile::reserve(int64_t size) {
  process_.check(caller_);
  const std::lock_guard lock(waits_->mutex);
  if (size > 0) grow(size_ + size);
}

// Grows the file to `size` bytes. Reserves the disk blocks now, so that no later write finds the disk full.
void SwapFile::grow(int64_t size) {
  const int64_t more = size - size_;
  struct statvfs info{};
  if (::fstatvfs(fd_, &info) != 0) fail("cannot ask for the free space", errno);
  const auto free = static_cast<int64_t>(info.f_bavail * info.f_frsize);
  const bool counts = info.f_blocks > 0;  // some file systems do not report how much space they have
  const int error = counts && more > free ? ENOSPC : reserve_blocks(size);
  if (error != 0) {
    if (::ftruncate(fd_, size_) != 0) fail("cannot give back space", errno);
    TORCH_CHECK(error != ENOSPC && error != EDQUOT, caller_, ": ", folder_, ": expected room for ", more,
                " bytes on the disk, received ", free, " free",
                error == EDQUOT ? " and a quota that is used up" : "",
                ": free some space or choose another folder");
    TORCH_CHECK(error != EFBIG, caller_, ": ", folder_, ": expected room for a file of ", size,
                " bytes, received a lower limit of the size of a file: raise the limit (ulimit -f) or choose "
                "another folder");
    fail("cannot reserve space", error);
  }
  extents_.free(size_, more);
  size_ = size;
}

// Reserves disk blocks up to `size`. Returns 0 or an errno. If the file system cannot reserve blocks, writes
// zeros instead. Otherwise, writing to mapped memory of a sparse file on a full disk would end the process
// with SIGBUS.
int SwapFile::reserve_blocks(int64_t size) const {
  if (const int error = io::reserve(fd_, size_, size - size_); error != EOPNOTSUPP) return error;
  constexpr int64_t kPiece = int64_t{1} << 20;
  const std::unique_ptr<void, void (*)(void*)> zeros(std::aligned_alloc(kAlignment, kPiece), std::free);
  if (zeros == nullptr) return ENOMEM;
  std::memset(zeros.get(), 0, kPiece);
  for (int64_t at = size_; at < size;) {
    const ssize_t n = ::pwrite(fd_, zeros.get(), static_cast<size_t>(std::min(size - at, kPiece)), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n < kAlignment) return ENOSPC;
    at += n / kAlignment * kAlignment;
  }
  return 0;
}

SwapFile::Ticket SwapFile::read(int64_t offset, void* to, int64_t size) {
  return submit({false, offset, static_cast<char*>(to), size});
}

SwapFile::Ticket SwapFile::write(int64_t offset, const void* from, int64_t size) {
  return submit({true, offset, const_cast<char*>(static_cast<const char*>(from)), size});
}

SwapFile::Ticket SwapFile::submit(Transfer transfer) {
  process_.check(caller_);
  const auto aligned = [](int64_t x) { return x % kAlignment == 0; };
  TORCH_CHECK(aligned(transfer.offset) && aligned(transfer.size) && transfer.size > 0 &&
                  aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(transfer.memory))),
              caller_, ": ", path_, ": expected memory, offset and size in multiples of ", kAlignment,
              " bytes, received ", transfer.size, " bytes at ", transfer.offset, ", memory at ",
              static_cast<const void*>(transfer.memory));
  std::unique_lock lock(waits_->mutex);
  TORCH_CHECK(transfer.offset >= 0 && transfer.offset + transfer.size <= size_, caller_, ": ", path_,
              ": expected an extent within ", size_, " bytes, received ", transfer.size, " at ",
              transfer.offset);
  const Ticket ticket = next_++;
  Transfer& submitted = *(transfers_[ticket] = std::make_unique<Transfer>(transfer));
  lock.unlock();
  engine_->submit(submitted);
  return ticket;
}

void SwapFile::wait(Ticket ticket) {
  process_.check(caller_);
  std::unique_lock lock(waits_->mutex);
  const auto found = transfers_.find(ticket);
  TORCH_CHECK(found != transfers_.end(), caller_, ": ", path_,
              ": ticket: expected one not waited for yet, received ", ticket);
  waits_->finished.wait(lock, [t = found->second.get()] { return t->finished; });
  const Transfer t = *found->second;
  transfers_.erase(ticket);
  lock.unlock();
  if (t.error == 0) return;
  const std::string extent = std::to_string(t.size) + " bytes at " + std::to_string(t.offset);
  if (t.error == io::kEndOfFile) {
    TORCH_CHECK(false, caller_, ": ", path_, ": cannot read ", extent, ": the file ends after ", t.done,
                " of them; something else has cut it");
  }
  fail((t.is_write ? "cannot write " : "cannot read ") + extent, t.error);
}

bool SwapFile::is_finished(Ticket ticket) const {
  process_.check(caller_);
  const std::lock_guard lock(waits_->mutex);
  const auto found = transfers_.find(ticket);
  return found == transfers_.end() || found->second->finished;
}

void SwapFile::fail(const std::string& what, int error) const {
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  TORCH_CHECK(false, caller_, ": ", path_, ": ", what, ": ", std::strerror(error),
              full ? "; free some space or choose another folder" : "");
}

}  // namespace shoestring::offload
