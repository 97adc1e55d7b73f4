// Emulates cp.async. The data arrive only when the thread that started the copy waits for it.

#include <cstring>

#include "internal.h"

namespace simt {
namespace {

struct Copy {
  unsigned char* to;
  const unsigned char* from;
  int bytes, from_bytes;
  bool committed;
  int group;
};
struct Copies {
  std::vector<Copy> copies;
  int groups = 0;
};
std::vector<Copies> async(kMaxThreads);

}  // namespace

void begin_copies() {
  for (Copies& c : async) c = Copies{};
}

void finish_thread() {
  if (!current->busy.empty()) fail("the thread returns while its wgmma are under way");
  if (!async[current->id].copies.empty()) fail("the thread returns while its cp.async are under way");
}

void copy_async(void* to, const void* from, int bytes, int from_bytes, Where where) {
  const Place place{nullptr, where};
  if (bytes != 4 && bytes != 8 && bytes != 16)
    fail("cp.async: expected 4, 8 or 16 bytes, received " + std::to_string(bytes));
  check_aligned(to, bytes, true, place);
  if (from_bytes > 0) {
    if (reinterpret_cast<uintptr_t>(from) % bytes != 0)
      bad_access("misaligned", bytes, false, false, place, "");
    check(from, from_bytes, false, false, place);
  }
  if (!is_shared(to, bytes))
    bad_access("cp.async writes to shared memory only", bytes, true, false, place, "");
  begin_write(to, bytes, current->id, place);
  async[current->id].copies.push_back({static_cast<unsigned char*>(to),
                                       static_cast<const unsigned char*>(from), bytes, from_bytes, false, 0});
}

void copy_async_commit(Where) {
  Copies& mine = async[current->id];
  ++mine.groups;
  for (Copy& c : mine.copies) {
    if (!c.committed) {
      c.committed = true;
      c.group = mine.groups;
    }
  }
}

void copy_async_wait(int pending, Where) {
  Copies& mine = async[current->id];
  std::vector<Copy> rest;
  for (const Copy& c : mine.copies) {
    if (!c.committed || c.group > mine.groups - pending) {
      rest.push_back(c);
      continue;
    }
    std::memcpy(c.to, c.from, c.from_bytes);
    std::memset(c.to + c.from_bytes, 0, c.bytes - c.from_bytes);
    end_write(c.to, c.bytes, current->id, current->clock);
  }
  mine.copies = std::move(rest);
}

}  // namespace simt
