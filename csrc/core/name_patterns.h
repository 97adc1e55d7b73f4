#pragma once

#include <fnmatch.h>

#include <algorithm>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace shoestring {

/// Returns whether a name matches a pattern, as fnmatch.fnmatchcase in Python does.
inline bool matches(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

/// Returns the indices of the names that match the pattern. Raises if there are none.
inline std::vector<size_t> matching(const char* function, const char* argument, const std::string& pattern,
                                    const std::vector<std::string>& names) {
  std::vector<size_t> indices;
  for (size_t i = 0; i < names.size(); ++i) {
    if (matches(pattern, names[i])) indices.push_back(i);
  }
  if (indices.empty()) {
    std::vector<std::string> some(names.begin(),
                                  names.begin() + static_cast<int64_t>(std::min<size_t>(names.size(), 5)));
    TORCH_CHECK_VALUE(false, function, ": ", argument,
                      ": expected a pattern that matches a parameter, received \"", pattern,
                      "\". The parameters are ", c10::Join(", ", some), names.size() > 5 ? ", ..." : "");
  }
  return indices;
}

}  // namespace shoestring
