#pragma once

#include <string>
#include <vector>

/// Locks the output folder of a training run against other processes, and creates the folder and its parents
/// if necessary. The lock is a POSIX record lock on FOLDER/.lock, the same one that `shoestring train` takes.
/// The kernel releases the lock when the process ends for any reason. On a file system without locks, the
/// folder is used unlocked.
class FolderLock {
 public:
  /// Raises InputError if another process has locked the folder, or if the file system refuses access.
  explicit FolderLock(const std::string& folder);
  /// Removes the lock file. Also removes the folders that this object created, if they are still empty.
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
