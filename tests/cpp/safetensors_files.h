#pragma once

#include <dirent.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "catch.h"

// A temporary folder without subfolders. POSIX, not std::filesystem: LibTorch exports an older copy of that, which
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

inline void write(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

inline std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A safetensors file with this header length.
inline std::string with_length(uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}

inline std::string file(const std::string& header, size_t data) {
  return with_length(header.size(), header + std::string(data, '\0'));
}

// What a call is refused with.
template <class Call>
std::string message(Call call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "(no error)";
}

inline void expect(const std::string& received, const std::string& part) {
  CAPTURE(received, part);
  CHECK(received.find(part) != std::string::npos);
}
