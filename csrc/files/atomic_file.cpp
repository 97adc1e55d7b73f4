#include "files/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "files/write_all.h"

namespace shoestring::files {

FileError::FileError(int code, const std::string& message)
    : c10::Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message), code(code) {}

AtomicFile::AtomicFile(std::string caller, std::string path)
    : caller_(std::move(caller)), path_(std::move(path)) {
  // Two writers of the same path must not share a temporary file. The name must also differ from temporary
  // files that a killed process left behind.
  for (int i = 0; fd_ < 0; ++i) {
    temporary_ = path_ + ".tmp" + std::to_string(::getpid()) + "-" + std::to_string(i);
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0 && errno != EEXIST) fail("cannot create the file", errno);
  }
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, int64_t size) {
  if (const int error = write_all(fd_, data, size, written_); error != 0) fail("cannot write", error);
}

void AtomicFile::commit() {
  if (::fsync(fd_) != 0) fail("cannot write", errno);
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot replace the file", errno);
  ::close(std::exchange(fd_, -1));
  // The new name of the file is on disk only once its folder has been synced.
  const auto slash = path_.rfind('/');
  sync_folder(caller_, slash == std::string::npos ? "." : path_.substr(0, slash + 1));
}

void AtomicFile::fail(const char* what, int error) const {
  const std::string where = caller_ + ": " + path_ + ": ";
  if (error == ENOSPC || error == EDQUOT) {
    throw FileError(error, c10::str(where, "the disk is full after ", written_,
                                    " bytes: free some space or choose another folder"));
  }
  throw FileError(error, c10::str(where, what, ": ", std::strerror(error)));
}

void remove_file(const std::string& caller, const std::string& path) {
  const bool gone = ::unlink(path.c_str()) == 0 || errno == ENOENT;
  TORCH_CHECK(gone, caller, ": ", path, ": cannot remove the file: ", std::strerror(errno));
}

void sync_folder(const std::string& caller, const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // fsync() fails with EINVAL on file systems that cannot sync folders; this error is ignored.
  const bool synced = fd >= 0 && (::fsync(fd) == 0 || errno == EINVAL);
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!synced)
    throw FileError(error, c10::str(caller, ": ", path, ": cannot sync the folder: ", std::strerror(error)));
}

void make_folders(const std::string& caller, const std::string& path) {
  for (size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    const std::string part = path.substr(0, end);
    struct stat info{};
    const bool is_folder =
        ::mkdir(part.c_str(), 0777) == 0 || (::stat(part.c_str(), &info) == 0 && S_ISDIR(info.st_mode));
    TORCH_CHECK(is_folder, caller, ": ", path, ": cannot make the folder: ", std::strerror(errno));
  }
}

}  // namespace shoestring::files
