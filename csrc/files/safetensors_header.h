#pragma once

#include <shoestring/safetensors.h>

#include <string>
#include <string_view>
#include <vector>

namespace shoestring::files {

struct Header {
  std::vector<SafetensorsFile::Entry> entries;  // ordered by position in the file
  Metadata metadata;
};

/// Parses and checks the JSON of a header. `data` is the number of bytes after the header in the file `path`.
Header parse_header(const std::string& path, std::string_view text, int64_t data);

}  // namespace shoestring::files
