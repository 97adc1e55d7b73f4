#pragma once

#include <cstdint>
#include <string>

namespace shoestring::files {

/// A file that appears under its name only when it is complete and on disk: written beside it, synced, then
/// renamed. Errors are c10::Error and begin with `caller`; without commit() nothing is left behind.
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

/// Removes a file, where it is there.
void remove_file(const std::string& caller, const std::string& path);

/// Returns once the names in a folder are on disk.
void sync_folder(const std::string& caller, const std::string& path);

/// Makes a folder, and those above it, where they are not there. (Not std::filesystem: LibTorch exports an
/// older library's copy of it, which crashes where it is called.)
void make_folders(const std::string& caller, const std::string& path);

}  // namespace shoestring::files
