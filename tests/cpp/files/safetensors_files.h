#pragma once

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "catch.h"
#include "folder.h"

inline void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Returns the bytes of a safetensors file: `length` as the claimed size of its header, and then `rest`.
inline std::string with_length(uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}

inline std::string file(const std::string& header, size_t data) {
  return with_length(header.size(), header + std::string(data, '\0'));
}

// Returns the message of the c10::Error that a call throws.
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
