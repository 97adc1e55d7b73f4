#pragma once

#include <shoestring/files/safetensors.h>

#include <string>
#include <string_view>
#include <vector>

namespace shoestring::files {

struct Header {
  std::vector<SafetensorsFile::Entry> entries;  // the file's tensors, ordered by the position of their data
  Metadata metadata;
};

/// Parses and checks the JSON header of a safetensors file. text: the header. data: number of bytes that
/// follow the header in the file `path`.
Header parse_header(const std::string& path, std::string_view text, int64_t data);

}  // namespace shoestring::files
