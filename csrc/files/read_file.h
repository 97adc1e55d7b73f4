#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <functional>
#include <string>

namespace shoestring::files {

/// Opens a regular file for reading and stores its size. Refuses folders, devices and named pipes without
/// waiting for them. Raises c10::Error with a message that begins with `caller` and the path.
int open_regular(const std::string& caller, const std::string& path, int64_t& size);

/// Reads `size` bytes at `offset` into `out`.
void read_at(const std::string& caller, const std::string& path, int fd, void* out, int64_t size,
             int64_t offset);

/// Receives each key of an object, with the nesting depth of objects and lists at that place.
using KeyVisitor = std::function<void(int depth, const std::string& key)>;

/// Parses JSON from a file. Limits the nesting depth and the number of values while parsing: the parsed tree
/// takes many times the memory of its text, and code that reads the tree may recurse per level. Raises
/// ValueError.
nlohmann::json parse_json(const std::string& place, const std::string& text, const KeyVisitor& visit = {});

/// Reads and parses a JSON file of at most `most` bytes, with the limits of parse_json().
nlohmann::json read_json(const std::string& caller, const std::string& path, int64_t most,
                         const KeyVisitor& visit = {});

}  // namespace shoestring::files
