#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

namespace shoestring::files {

/// A system call on a file failed.
class FileError : public c10::Error {
 public:
  FileError(int code, const std::string& message);
  int code;  ///< the value of errno
};

/// A file that appears under its final name only when it is complete and on disk. The data is written to a
/// temporary file in the same folder; commit() syncs and renames it. Without commit(), the destructor removes
/// the temporary file. Errors are raised as FileError, and their messages begin with `caller`.
class AtomicFile {
 public:
  AtomicFile(std::string caller, std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, int64_t size);
  void commit();

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::string caller_, path_, temporary_;
  int fd_ = -1;
  int64_t written_ = 0;
};

/// Removes the file if it exists.
void remove_file(const std::string& caller, const std::string& path);

/// Syncs a folder: returns once the names of the files in it are on disk. Raises FileError.
void sync_folder(const std::string& caller, const std::string& path);

/// Creates a folder and its missing parents. Does not use std::filesystem, because LibTorch exports an older
/// version of that library, and calls to it crash.
void make_folders(const std::string& caller, const std::string& path);

}  // namespace shoestring::files
