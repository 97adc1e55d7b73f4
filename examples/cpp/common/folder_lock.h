#pragma once

#include <string>
#include <vector>

/// Holds the folder of a run against other processes, and makes the folder, and those above it, where they
/// are absent. The lock is a POSIX record lock on FOLDER/.lock, the same one that the command `shoestring
/// train` takes: the kernel frees it when the process ends, however that ends. A file system without locks is
/// used without.
class FolderLock {
 public:
  /// Raises InputError where another process holds the folder, or where the file system refuses it.
  explicit FolderLock(const std::string& folder);
  /// Removes the lock file, and the folders made here that are still empty.
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  void make_folders();
  bool acquire();
  void release();

  std::string folder_, path_;
  std::vector<std::string> made_;
  int fd_ = -1;
};
