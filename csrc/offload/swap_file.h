#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include <shoestring/core/export.h>

#include "offload/extents.h"
#include "offload/own_process.h"
#include "offload/transfers.h"

namespace shoestring::offload {

/// A file used as memory, with many concurrent reads and writes that bypass the page cache (O_DIRECT),
/// through io_uring. The file is unlinked once it is open, so its space is freed however the process ends.
/// Thread-safe. Errors are c10::Error and begin with `caller` and the file's path. Every use in a forked
/// child raises, since parent and child would allocate the same extents.
class SHOESTRING_API SwapFile {
 public:
  // Required alignment in bytes of offsets, sizes and memory addresses: a multiple of any disk's sector size.
  static constexpr int64_t kAlignment = 4096;
  enum class Backend { kBest, kThreads };

  /// Creates an empty swap file in `folder`, which must exist.
  SwapFile(std::string caller, const std::string& folder, Backend backend = Backend::kBest);
  /// Waits for all transfers, whose memory must live until then. In a forked child, only closes the file.
  ~SwapFile();
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  /// Allocates `size` bytes of the file and returns their offset. `size` must be a multiple of kAlignment.
  /// The file grows if necessary. If the disk has no room, raises an error with the bytes needed and free,
  /// and changes nothing.
  int64_t allocate(int64_t size);
  void free(int64_t offset, int64_t size);
  /// Grows the file by `size` bytes now, for later calls of allocate(). If the disk has no room, raises the
  /// same error as allocate().
  void reserve(int64_t size);

  /// Start a read or write of the file and return its ticket. Transfers run in any order, so wait for a write
  /// before reading the same extent. wait() must be called once for each ticket.
  using Ticket = int64_t;
  Ticket read(int64_t offset, void* to, int64_t size);
  Ticket write(int64_t offset, const void* from, int64_t size);
  /// Waits until the transfer with this ticket is over. If it failed, raises an error that names the extent.
  void wait(Ticket ticket);
  bool is_finished(Ticket ticket) const;

  /// Returns whether the file system supports O_DIRECT. If not, transfers go through the page cache.
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
  // All transfers for whose tickets wait() has not been called yet.
  std::unordered_map<Ticket, std::unique_ptr<io::Transfer>> transfers_;
  // the last member, so that the engine is destroyed before the members that its threads use
  ProcessOwned<io::Engine> engine_;
};

}  // namespace shoestring::offload
