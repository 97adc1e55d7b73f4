#include "files/read_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

namespace shoestring::files {
namespace {

constexpr int kDeepest = 64;  // maximum nesting of JSON objects and lists; real files nest at most 4
// maximum number of values in a JSON text; real files have about one per tensor
constexpr int64_t kMost = 1'000'000;

struct Closer {
  int fd;
  ~Closer() { ::close(fd); }
};

}  // namespace

int open_regular(const std::string& caller, const std::string& path, int64_t& size) {
  // With O_NONBLOCK, open() does not block on a named pipe. Named pipes are rejected below.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  TORCH_CHECK_VALUE(fd >= 0, caller, ": ", path, ": cannot open: ", std::strerror(errno));
  struct stat info{};
  const bool regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  if (!regular) ::close(fd);
  TORCH_CHECK_VALUE(regular, caller, ": ", path, ": expected a regular file");
  size = info.st_size;
  return fd;
}

void read_at(const std::string& caller, const std::string& path, int fd, void* out, int64_t size,
             int64_t offset) {
  auto* to = static_cast<char*>(out);
  while (size > 0) {
    const ssize_t n = ::pread(fd, to, std::min<int64_t>(size, int64_t{1} << 30), offset);
    if (n < 0 && errno == EINTR) continue;
    TORCH_CHECK(n >= 0, caller, ": ", path, ": cannot read: ", std::strerror(errno));
    TORCH_CHECK_VALUE(n > 0, caller, ": ", path, ": ends at byte ", offset,
                      ": another process is changing the file");
    to += n;
    offset += n;
    size -= n;
  }
}

nlohmann::json parse_json(const std::string& where, const std::string& text, const KeyVisitor& visit) {
  using Event = nlohmann::json::parse_event_t;
  int64_t values = 0;
  const auto check = [&](int depth, Event event, nlohmann::json& parsed) {
    const bool begins = event == Event::object_start || event == Event::array_start;
    TORCH_CHECK_VALUE(!begins || depth < kDeepest, where, ": expected JSON of at most ", kDeepest,
                      " nested objects and lists, received more");
    if (begins || event == Event::value) ++values;
    TORCH_CHECK_VALUE(values <= kMost, where, ": expected JSON of at most ", kMost, " values, received more");
    if (event == Event::key && visit) visit(depth, parsed.get_ref<const std::string&>());
    return true;
  };
  auto json = nlohmann::json::parse(text, check, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(!json.is_discarded(), where, ": not valid JSON in UTF-8");
  return json;
}

std::string read_text(const std::string& caller, const std::string& path, int64_t most) {
  int64_t size = 0;
  const Closer file{open_regular(caller, path, size)};
  TORCH_CHECK_VALUE(size <= most, caller, ": ", path, ": expected a file of at most ", most,
                    " bytes, received ", size);
  std::string text(static_cast<size_t>(size), '\0');
  read_at(caller, path, file.fd, text.data(), size, 0);
  return text;
}

nlohmann::json read_json(const std::string& caller, const std::string& path, int64_t most) {
  return parse_json(caller + ": " + path, read_text(caller, path, most));
}

}  // namespace shoestring::files
