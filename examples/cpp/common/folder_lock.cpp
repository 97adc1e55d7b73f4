#include "folder_lock.h"

// A lock on the output folder of a training run, by a POSIX record lock on FOLDER/.lock.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <sstream>
#include <utility>

#include "input_error.h"

namespace {

constexpr int kAttempts = 100;

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  return ::gethostname(name, HOST_NAME_MAX) == 0 ? name : "";
}

// Returns a description of the process whose id is in the lock file. A process writes its id and host name
// just after it takes the lock.
std::string holder(int fd) {
  char text[HOST_NAME_MAX + 32] = {};
  if (::pread(fd, text, sizeof text - 1, 0) <= 0) return "another process";
  std::istringstream words(text);
  long long pid = 0;
  std::string host;
  if (!(words >> pid >> host)) return "another process";
  return "process " + std::to_string(pid) + (host == host_name() ? "" : " on " + host);
}

}  // namespace

FolderLock::FolderLock(const std::string& folder) : folder_(folder), path_(folder + "/.lock") {
  try {
    for (int i = 0; i < kAttempts; ++i) {
      make_folders();
      if (acquire()) return;
    }
    throw InputError("--out " + folder_ + ": cannot lock the folder");
  } catch (...) {
    release();
    throw;
  }
}

FolderLock::~FolderLock() {
  // Remove the lock file before the lock is released, since afterwards another process may own the file.
  if (fd_ >= 0) ::unlink(path_.c_str());
  release();
}

void FolderLock::release() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  while (!made_.empty()) {
    ::rmdir(made_.back().c_str());
    made_.pop_back();
  }
}

void FolderLock::make_folders() {
  for (size_t at = 0; at != std::string::npos;) {
    at = folder_.find('/', at + 1);
    const std::string part = folder_.substr(0, at);
    if (::mkdir(part.c_str(), 0777) == 0) {
      made_.push_back(part);
      continue;
    }
    const int error = errno;
    struct stat info{};
    if (::stat(part.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
      throw InputError("--out " + folder_ + ": cannot make the folder: " + std::strerror(error));
    }
  }
}

// Takes the lock. Returns false if another process has removed the folder or the lock file while this
// function ran; the caller then tries again.
bool FolderLock::acquire() {
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0 && errno == ENOENT) return false;
  if (fd_ < 0) throw InputError("--out " + folder_ + ": cannot write there: " + std::strerror(errno));
  struct flock whole{};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  if (::fcntl(fd_, F_SETLK, &whole) != 0 && (errno == EACCES || errno == EAGAIN)) {
    throw InputError("--out " + folder_ + ": in use by " + holder(fd_));
  }
  struct stat ours{}, there{};
  ::fstat(fd_, &ours);
  if (::stat(path_.c_str(), &there) != 0 || there.st_ino != ours.st_ino || there.st_dev != ours.st_dev) {
    ::close(std::exchange(fd_, -1));
    return false;
  }
  const std::string text = std::to_string(::getpid()) + " " + host_name() + "\n";
  const auto size = static_cast<ssize_t>(text.size());
  errno = ENOSPC;  // A short write sets no error.
  const bool written = ::ftruncate(fd_, 0) == 0 && ::pwrite(fd_, text.data(), text.size(), 0) == size;
  if (!written) throw InputError("--out " + folder_ + ": cannot write there: " + std::strerror(errno));
  return true;
}
