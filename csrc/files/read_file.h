#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <functional>
#include <string>

namespace shoestring::files {

/// Opens a regular file for reading, stores its size in `size` and returns the file descriptor. Rejects
/// folders, devices and named pipes without blocking on them. Raises c10::Error, whose message begins with
/// `caller` and the path.
int open_regular(const std::string& caller, const std::string& path, int64_t& size);

/// Reads `size` bytes of an open file, starting at byte `offset`, into `out`. `caller` and `path` begin error
/// messages.
void read_at(const std::string& caller, const std::string& path, int fd, void* out, int64_t size,
             int64_t offset);

/// Reads a file of at most `most` bytes. Raises an error if the file is larger or cannot be read.
std::string read_text(const std::string& caller, const std::string& path, int64_t most);

/// Function that the JSON parser calls with each key of an object, and with the number of objects and lists
/// around the key.
using KeyVisitor = std::function<void(int depth, const std::string& key)>;

/// Parses JSON text from a file. Raises ValueError as soon as the text is nested too deeply or has too many
/// values. The parsed tree takes many times the memory of the text, and code that reads the tree may recurse
/// once per level of nesting. `where` begins the error message.
nlohmann::json parse_json(const std::string& where, const std::string& text, const KeyVisitor& visit = {});

/// Reads and parses a JSON file. Raises the errors of read_text() and parse_json().
nlohmann::json read_json(const std::string& caller, const std::string& path, int64_t most);

}  // namespace shoestring::files
