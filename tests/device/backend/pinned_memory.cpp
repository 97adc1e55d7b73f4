#include "pinned_memory.h"

#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#include "streams.h"

namespace simdev {
namespace {

constexpr size_t kPinnedBytes = size_t{8} << 30;  // address space
constexpr size_t kChunk = 1 << 16;                // accesses are kept by chunks of this many bytes
constexpr int kOpen = PROT_READ | PROT_WRITE;

char* page_of(const void* p) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(p) / kPage * kPage);
}
char* chunk_of(const void* p) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(p) / kChunk * kChunk);
}

// An access of a device that, as far as the host knows, is not over.
struct Flight {
  Range range;
  Position position;
  const char* name;
};

struct PinnedBlock {
  size_t size;
  std::vector<Position> uses;
};

// The handler of SIGSEGV reads these two, so they have a lock of their own, under which nothing faults.
auto& mappings = *new std::vector<Mapping>;  // the first one is the allocator's
auto& flights = *new std::vector<Flight>;
std::atomic_flag spin = ATOMIC_FLAG_INIT;
struct Spin {
  Spin() {
    while (spin.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~Spin() { spin.clear(std::memory_order_release); }
};

// These are guarded by records().
auto& seen = *new std::map<char*, std::vector<Access>>;
auto& pinned_blocks = *new std::map<char*, PinnedBlock>;
auto& idle = *new std::multimap<size_t, std::pair<char*, PinnedBlock>>;
size_t top = 0;

const Mapping* mapping_of(const void* p) {
  for (const Mapping& m : mappings) {
    if (m.contains(p)) return &m;
  }
  return nullptr;
}

void set_access(const Range& range, int access) {
  char* first = page_of(range.begin);
  char* last = page_of(range.end + kPage - 1);
  if (first < last) mprotect(first, static_cast<size_t>(last - first), access);
}
int access_during(const Flight& flight) { return flight.range.is_write ? PROT_NONE : PROT_READ; }

// Drops the flights for which `is_over` is true, and opens their pages as far as others allow.
template <class IsOver>
void land(const IsOver& is_over) {
  const Spin lock;
  std::vector<Range> opened;
  std::erase_if(flights, [&](const Flight& f) {
    if (is_over(f)) opened.push_back(f.range);
    return is_over(f);
  });
  for (const Range& range : opened) set_access(range, kOpen);
  for (const Range& range : opened) {
    for (const Flight& f : flights) {
      if (f.range.begin < range.end + kPage && range.begin < f.range.end + kPage)
        set_access(f.range, access_during(f));
    }
  }
}

void forget(char* begin, size_t size) {
  land([&](const Flight& f) { return f.range.begin < begin + size && begin < f.range.end; });
  for (char* chunk = chunk_of(begin); chunk < begin + size; chunk += kChunk) {
    const auto found = seen.find(chunk);
    if (found == seen.end()) continue;
    std::erase_if(found->second,
                  [&](const Access& a) { return a.range.begin < begin + size && begin < a.range.end; });
    if (found->second.empty()) seen.erase(found);
  }
}

void release_pinned(void* p) {
  const std::lock_guard lock(records());
  const auto found = pinned_blocks.find(static_cast<char*>(p));
  idle.emplace(found->second.size, std::pair(found->first, std::move(found->second)));
  pinned_blocks.erase(found);
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    size = std::max(kPage, (size + kPage - 1) / kPage * kPage);
    const c10::Device cpu(c10::kCPU);
    const std::lock_guard lock(records());
    const auto [first, last] = idle.equal_range(size);
    for (auto it = first; it != last; ++it) {
      auto& [begin, block] = it->second;
      std::erase_if(block.uses, [](const Position& p) { return is_over(p); });
      if (!block.uses.empty()) continue;
      char* const p = begin;
      idle.erase(it);
      forget(p, size);
      pinned_blocks[p] = {size, {}};
      return {p, p, &release_pinned, cpu};
    }
    TORCH_CHECK(top + size <= kPinnedBytes, "simdev: out of pinned memory");
    char* const p = mappings.front().tensor + top;
    top += size;
    pinned_blocks[p] = {size, {}};
    return {p, p, &release_pinned, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool record_event(void* p, void*, c10::Stream stream) override {
    use_pinned(p, position_of(from_c10(stream)));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

struct sigaction action_before;
std::atomic<bool> is_fatal{false};

// Lets the handler that was there before end the process. It may raise the signal again for this one.
void pass_on() {
  if (!is_fatal.exchange(true)) {
    sigaction(SIGSEGV, &action_before, nullptr);
  } else {
    signal(SIGSEGV, SIG_DFL);
  }
}

// Says which access faulted, and lets the next handler end the process. Pages are protected as a whole, so a
// fault beside the bytes that a device uses opens its page.
void on_fault(int, siginfo_t* info, void* context) {
  if (info->si_code <= 0) {  // another handler has raised the signal, and the access will fault again
    if (is_fatal) signal(SIGSEGV, SIG_DFL);
    return;
  }
  const char* const p = static_cast<char*>(info->si_addr);
  const bool is_write = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
  const char* const verb = is_write ? "wrote" : "read";
  char text[512];
  int length = 0;
  if (const int device = device_of(p); device >= 0) {
    length = std::snprintf(text, sizeof text, "\nsimdev: %s %s memory of device %d without a kernel, at\n",
                           is_stream_thread() ? "an operation" : "the host", verb, device);
  } else {
    const Spin lock;
    if (mapping_of(p) == nullptr) return pass_on();
    const Flight* hit = nullptr;
    for (const Flight& f : flights) {
      // The address may be anywhere in the bytes of a vector access.
      const bool inside = p + 64 > f.range.begin && p < f.range.end && p >= f.range.begin;
      if (inside && (f.range.is_write || is_write)) hit = &f;
    }
    if (hit == nullptr) {
      mprotect(page_of(p), kPage, kOpen);
      return;
    }
    length = std::snprintf(
        text, sizeof text,
        "\nsimdev: the host %s pinned memory that %s (stream %d of device %d, operation %lu) %s, and the "
        "host "
        "has not waited for it, at\n",
        verb, hit->name, hit->position.stream % kStreamsPerDevice, device_of_stream(hit->position.stream),
        static_cast<unsigned long>(hit->position.number), hit->range.is_write ? "writes" : "reads");
  }
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, text, static_cast<size_t>(length));
  void* frames[32];
  backtrace_symbols_fd(frames, backtrace(frames, 32), STDERR_FILENO);
  pass_on();  // faulthandler prints the Python stack
}

// Makes on_fault() the handler that comes first, since faults beside the bytes in use are no mistakes.
void install_handler() {
  struct sigaction action{};
  sigaction(SIGSEGV, nullptr, &action);
  if ((action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_fault) return;
  action_before = action;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace

at::HostAllocator* pinned_allocator() {
  static auto& one = *new PinnedAllocator;
  return &one;
}

bool is_pinned(const void* p) {
  const Spin lock;
  return mapping_of(p) != nullptr;
}

char* pinned_kernel_address(const void* p) {
  const Spin lock;
  const Mapping* mapping = mapping_of(p);
  return mapping == nullptr ? nullptr : mapping->kernel_address(p);
}

const char* pin(void* p, size_t size) {
  if (page_of(p) != p || size % kPage != 0) return "expected whole pages";
  const std::lock_guard lock(records());
  auto* const begin = static_cast<char*>(p);
  // Only pages that differ from zero are copied, so that the others stay without memory.
  std::vector<std::pair<size_t, std::vector<char>>> kept;
  static const std::vector<char> kZeros(kPage);
  for (size_t i = 0; i < size; i += kPage) {
    if (std::memcmp(begin + i, kZeros.data(), kPage) != 0)
      kept.emplace_back(i, std::vector<char>(begin + i, begin + i + kPage));
  }
  const Mapping mapping = map_twice(size, kOpen, p);
  for (const auto& [i, page] : kept) std::memcpy(begin + i, page.data(), kPage);
  const Spin spinning;
  mappings.push_back(mapping);
  return nullptr;
}

const char* unpin(void* p) {
  const std::lock_guard lock(records());
  Mapping mapping;
  {
    const Spin spinning;
    const auto found =
        std::find_if(mappings.begin() + 1, mappings.end(), [&](const Mapping& m) { return m.tensor == p; });
    if (found == mappings.end()) return "this memory is not pinned";
    mapping = *found;
  }
  for (const Flight& f : flights) {
    if (mapping.contains(f.range.begin))
      add_finding(std::string("race: pinned memory is released while ") + f.name + " uses it");
  }
  forget(mapping.tensor, mapping.size);
  const Spin spinning;
  std::erase_if(mappings, [&](const Mapping& m) { return m.tensor == p; });
  // The kernel's address stays mapped, since an operation may still use it after a finding.
  return nullptr;
}

void use_pinned(const void* p, const Position& position) {
  const std::lock_guard lock(records());
  auto after = pinned_blocks.upper_bound(static_cast<char*>(const_cast<void*>(p)));
  if (after == pinned_blocks.begin()) return;
  auto& [begin, block] = *std::prev(after);
  if (p < begin + block.size) block.uses.push_back(position);
}

void check_pinned_access(const Range& range, const Position& position, const Clock& clock, const char* name) {
  if (!is_pinned(range.begin)) return;
  for (char* chunk = chunk_of(range.begin); chunk < range.end; chunk += kChunk) {
    const Range part{std::max(chunk, range.begin), std::min(chunk + kChunk, range.end), range.is_write};
    check_access(seen[chunk], part, position, clock, name);
  }
  install_handler();  // another one may have come later
  const Spin lock;
  flights.push_back({range, position, name});
  set_access(range, access_during(flights.back()));
}

void release_pinned(const Clock& clock) {
  land([&](const Flight& f) { return clock[f.position.stream] >= f.position.number; });
}

void watch_host_accesses() {
  mappings.reserve(4096);  // the handler of faults reads it
  mappings.push_back(map_twice(kPinnedBytes, kOpen));
  void* frame[1];
  backtrace(frame, 1);  // loads what backtrace() needs, which the handler must not do
  install_handler();
}

}  // namespace simdev
