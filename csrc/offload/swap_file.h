#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include <shoestring/export.h>

#include "offload/extents.h"
#include "offload/own_process.h"
#include "offload/transfers.h"

namespace shoestring::offload {

/// Memory on disk: a file that is read and written many extents at a time, past the page cache (O_DIRECT),
/// through io_uring. Its name is gone once it is open, so that its space is free again however the process
/// ends. May be used from several threads. Errors are c10::Error, and begin with `caller` and the file. In a
/// forked child every use is one: both processes would give the same extents away.
class SHOESTRING_API SwapFile {
 public:
  static constexpr int64_t kAlignment = 4096;  // of offsets, sizes and memory: any disk's sector
  enum class Backend { kBest, kThreads };

  /// In `folder`, which is there; empty.
  SwapFile(std::string caller, const std::string& folder, Backend backend = Backend::kBest);
  /// After all transfers: memory that is read into has to live until then. In a forked child it only closes
  /// the file.
  ~SwapFile();
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  /// The offset of `size` bytes (a multiple of kAlignment) that are nobody else's; the file grows where it
  /// has to. An error, with the bytes needed and free, where the disk has no room; nothing has changed then.
  int64_t allocate(int64_t size);
  void free(int64_t offset, int64_t size);
  /// Makes the file `size` bytes larger now, for later calls of allocate(). The same error where the disk has
  /// no room.
  void reserve(int64_t size);

  /// Begin at once, in any order: who writes waits before reading the same extent. Each ticket is waited for
  /// once.
  using Ticket = int64_t;
  Ticket read(int64_t offset, void* to, int64_t size);
  Ticket write(int64_t offset, const void* from, int64_t size);
  /// Until the transfer is over; an error that names the extent where it has failed.
  void wait(Ticket ticket);
  bool is_finished(Ticket ticket) const;

  /// Whether the file system has O_DIRECT; else transfers go through the page cache.
  bool is_direct() const { return direct_; }
  bool uses_io_uring() const { return uring_; }
  const std::string& path() const { return path_; }
  int descriptor() const { return fd_; }
  int64_t size() const { return size_; }

 private:
  Ticket submit(io::Transfer transfer);
  void grow(int64_t size);
  int reserve_blocks(int64_t size) const;
  [[noreturn]] void fail(const std::string& what, int error) const;

  struct Waits {
    std::mutex mutex;
    std::condition_variable finished;
  };

  const OwnProcess process_;
  const std::string caller_, folder_;
  std::string path_;
  int fd_ = -1;
  bool direct_ = true, uring_ = false;
  const ProcessOwned<Waits> waits_ = make_process_owned<Waits>();
  Extents extents_;
  int64_t size_ = 0;
  Ticket next_ = 0;
  std::unordered_map<Ticket, std::unique_ptr<io::Transfer>> transfers_;  // not waited for
  ProcessOwned<io::Engine> engine_;                                      // the last member: it goes first
};

}  // namespace shoestring::offload
