#include "files/write_all.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <memory>

namespace shoestring::files {
namespace {

constexpr int64_t kPiece = int64_t{8} << 20;
constexpr int64_t kFew =
    // Buffers of at most kFew bytes are written without calling is_shared_mapping(), which reads
    // /proc/self/maps. Reading it would take as long as writing the buffer.
    int64_t{1} << 20;

// Returns whether the memory range lies in one shared mapping of a file. Pages of such a mapping may be
// dropped from memory, because their contents are kept in the file.
bool is_shared_mapping([[maybe_unused]] uintptr_t begin, [[maybe_unused]] uintptr_t end) {
#if defined(__linux__)
  const std::unique_ptr<FILE, int (*)(FILE*)> maps(std::fopen("/proc/self/maps", "re"), &std::fclose);
  uintptr_t first = 0, last = 0;
  char access[5] = {};
  while (maps &&
         std::fscanf(maps.get(), "%" SCNxPTR "-%" SCNxPTR " %4s%*[^\n]", &first, &last, access) == 3) {
    if (first <= begin && end <= last) return access[3] == 's';
  }
#endif
  return false;
}

}  // namespace

int write_all(int fd, const void* data, int64_t size, int64_t& written) {
  const auto* from = static_cast<const char*>(data);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const bool drops = size > kFew && is_shared_mapping(begin, begin + static_cast<uintptr_t>(size));
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  while (size > 0) {
    const ssize_t n = ::write(fd, from, static_cast<size_t>(std::min(size, kPiece)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (drops) {
      const uintptr_t first = reinterpret_cast<uintptr_t>(from) / page * page;
      ::madvise(reinterpret_cast<void*>(first),
                reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(n) - first, MADV_DONTNEED);
    }
    from += n;
    size -= n;
    written += n;
  }
  return 0;
}

}  // namespace shoestring::files
