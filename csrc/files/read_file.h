#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <functional>
#include <string>

namespace shoestring::files {

/// Opens a regular file for reading, and stores its size. Refuses folders, devices and named pipes without
/// waiting for them. Raises c10::Error, which begins with `caller` and the path.
int open_regular(const std::string& caller, const std::string& path, int64_t& size);

/// Reads `size` bytes at `offset`.
void read_at(const std::string& caller, const std::string& path, int fd, void* out, int64_t size,
             int64_t offset);

/// Sees each name in an object: how many objects and lists it is in, and the name.
using KeyVisitor = std::function<void(int depth, const std::string& key)>;

/// Parses JSON from a file. The depth and the number of values are limited while the text is parsed, since a
/// tree takes many times the memory of its text, and what reads a tree may call itself for each level. Raises
/// ValueError.
nlohmann::json parse_json(const std::string& place, const std::string& text, const KeyVisitor& visit = {});

/// The same of a file of at most `most` bytes.
nlohmann::json read_json(const std::string& caller, const std::string& path, int64_t most,
                         const KeyVisitor& visit = {});

}  // namespace shoestring::files
