#pragma once

#include <dirent.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

// A temporary folder, which is removed with its files when the object is destroyed. It must not contain
// subfolders. The class uses POSIX calls because LibTorch exports an older copy of std::filesystem that
// crashes.
struct Folder {
  Folder() : path(::mkdtemp(name)) {}
  ~Folder() {
    for (const auto& file : files()) std::remove((path + "/" + file).c_str());
    ::rmdir(path.c_str());
  }
  std::string operator/(const std::string& file) const { return path + "/" + file; }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    DIR* dir = ::opendir(path.c_str());
    while (const dirent* entry = ::readdir(dir)) {
      if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
    }
    ::closedir(dir);
    return names;
  }
  char name[32] = "/tmp/shoestring-XXXXXX";
  std::string path;
};
